"""Properties of a tensor subclass under Dynamo: their getters are traced.

Dynamo evaluates a property of an argument before its graph runs, as it reads an attribute, and takes what it gives as
an input of its own. After a write in the graph to what the property is computed from, that is the old value; and its
sizes are new ones to Dynamo, which compiles again for each. So in a graph that is meant for this pass the getter is a
function like any other. PyTorch's own backends keep Dynamo's way.
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
    """Makes Dynamo trace the getters of properties of tensor subclasses in graphs for `backend`."""
    evaluate = private.TensorVariable.dynamic_getattr

    @functools.wraps(evaluate)
    def dynamic_getattr(self: Any, tx: Any, name: str) -> Any:
        getter = _getter_of(wrapper_of(self), name)
        if getter is None or backend_of(tx.output) is not backend:
            return evaluate(self, tx, name)
        source = None
        if self.source is not None:
            source = private.AttrSource(private.AttrSource(private.TypeSource(self.source), name), "fget")
        return private.VariableTracker.build(tx, getter, source).call_function(tx, [self], {})

    private.TensorVariable.dynamic_getattr = dynamic_getattr


def _getter_of(value: Tensor | None, name: str) -> Callable[..., Any] | None:
    """The function behind a property that the author of a wrapper's class wrote; PyTorch's own classes Dynamo knows."""
    if value is None or hasattr(Tensor, name) or type(value).__module__.startswith("torch."):
        return None
    found = inspect.getattr_static(type(value), name, None)
    return found.fget if isinstance(found, property) and isinstance(found.fget, FunctionType) else None
