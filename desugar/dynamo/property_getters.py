"""Makes Dynamo trace the getters of properties of tensor subclasses.

Dynamo evaluates a property of an argument before its graph runs, like an attribute, and makes the result a separate
input of the graph. If the graph mutates what the property is computed from, that input has the old value. Dynamo also
treats its sizes as unrelated to the argument's sizes, and recompiles for each new one. Therefore Dynamo traces the
getter like any other function in a graph that is compiled with this backend. For other backends Dynamo's behaviour
does not change.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import Tensor

from desugar import _torch as private
from desugar.dynamo.inner_assignment import backend_of, wrapper_of


def trace_properties(backend: Callable[..., Any]) -> None:
    """Makes Dynamo trace the getters of tensor subclass properties in the graphs for `backend`."""
    private.after_import_of("TensorVariable", functools.partial(_patch, backend))


def _patch(backend: Callable[..., Any], tensor_variable: Any) -> None:
    evaluate = tensor_variable.dynamic_getattr

    @functools.wraps(evaluate)
    def dynamic_getattr(self: Any, tx: Any, name: str) -> Any:
        getter = _getter_of(wrapper_of(self), name)
        if getter is None or backend_of(tx.output) is not backend:
            return evaluate(self, tx, name)
        source = None
        if self.source is not None:
            source = private.AttrSource(private.AttrSource(private.TypeSource(self.source), name), "fget")
        return private.VariableTracker.build(tx, getter, source).call_function(tx, [self], {})

    tensor_variable.dynamic_getattr = dynamic_getattr


def _getter_of(value: Tensor | None, name: str) -> Callable[..., Any] | None:
    """Returns the getter of a property that the author of a wrapper class wrote, else None.

    Dynamo handles the properties of `Tensor` and of PyTorch's own subclasses itself.
    """
    if value is None or hasattr(Tensor, name) or type(value).__module__.startswith("torch."):
        return None
    found = inspect.getattr_static(type(value), name, None)
    return found.fget if isinstance(found, property) and isinstance(found.fget, FunctionType) else None
