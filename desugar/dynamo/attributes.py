"""Changes how Dynamo handles attributes of tensor subclasses in the graphs for this backend.

Dynamo traces the getters of properties, and breaks the graph at an assignment to an inner tensor. For other backends,
Dynamo's behaviour does not change, except that an assignment to a field of a declared class breaks every graph.

Dynamo evaluates a property of an argument before its graph runs, like an attribute, and makes the result a separate
input of the graph. If the graph mutates a tensor that the getter reads, that input keeps the old value. Dynamo also
treats the input's sizes as unrelated to the argument's sizes, and recompiles for each new size. Therefore Dynamo traces
the getter like any other function.

Dynamo assigns an attribute after its graph has run, and no node of the graph represents the assignment. So later ops
on the tensor subclass in the same graph would use the old inner tensor. Therefore an assignment to an inner tensor or
to metadata ends the graph: the assignment runs between two graphs, and the second graph reads the new value.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import Tensor

from desugar import _torch as torch_private
from subclasses import TensorSubclass, _torch_capture as capture
from subclasses._torch import is_traceable_wrapper_subclass
from subclasses._torch_tracing import backend_of

# ---- properties --------------------------------------------------------------------------------------------


def trace_properties(backend: Callable[..., Any]) -> None:
    """Makes Dynamo trace the getters of tensor subclass properties in the graphs for `backend`."""
    torch_private.after_import_of("TensorVariable", functools.partial(_patch_reads, backend))


def _patch_reads(backend: Callable[..., Any], tensor_variable: Any) -> None:
    evaluate = tensor_variable.dynamic_getattr

    @functools.wraps(evaluate)
    def dynamic_getattr(self: Any, tx: Any, name: str) -> Any:
        getter = _getter_of(wrapper_of(self), name)
        if getter is None or backend_of(tx.output) is not backend:
            return evaluate(self, tx, name)
        source = None
        if self.source is not None:
            source = torch_private.AttrSource(
                torch_private.AttrSource(torch_private.TypeSource(self.source), name), "fget"
            )
        return torch_private.VariableTracker.build(tx, getter, source).call_function(tx, [self], {})

    tensor_variable.dynamic_getattr = dynamic_getattr


def _getter_of(value: Tensor | None, name: str) -> Callable[..., Any] | None:
    """Returns the getter of a property that the author of a wrapper class wrote, else None.

    Dynamo handles the properties of `Tensor` and of PyTorch's own subclasses itself.
    """
    if value is None or hasattr(Tensor, name) or type(value).__module__.startswith("torch."):
        return None
    attribute = inspect.getattr_static(type(value), name, None)
    return (
        attribute.fget
        if isinstance(attribute, property) and isinstance(attribute.fget, FunctionType)
        else None
    )


# ---- assignments -------------------------------------------------------------------------------------------


def break_at_assignments(backend: Callable[..., Any]) -> None:
    """Makes Dynamo break the graphs for `backend` at an assignment to an attribute that a wrapper of any class has.

    Rules and methods assign in nodes of the graph, which `desugar.tracing` traces.
    """
    setattr(backend, capture.MAKES_ASSIGNMENTS, True)
    capture.break_at_assignments(
        lambda value, name, graph: (
            isinstance(value, Tensor)
            and is_traceable_wrapper_subclass(value)
            and _is_part(value, name)
            and backend_of(graph) is backend
        )
    )


def wrapper_of(item: Any) -> Tensor | None:
    """Returns the fake value of a Dynamo variable if it is a traceable wrapper subclass, else None."""
    proxy = getattr(item, "proxy", None)
    value = proxy.node.meta.get("example_value") if proxy is not None else None
    return value if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value) else None  # type: ignore[return-value]


def _is_part(value: Tensor, name: str) -> bool:
    """Returns whether a wrapper already has an attribute in its `__dict__`, or among its inner tensors or fields.

    `desugar.tracing` does not trace other attributes.
    """
    fields = value.__spec__.inner_names if isinstance(value, TensorSubclass) else ()
    return name in value.__dict__ or name in fields or name in value.__tensor_flatten__()[0]  # type: ignore[attr-defined]
