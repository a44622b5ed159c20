"""Assigning to an inner tensor under Dynamo: the graph ends there.

Dynamo carries out an assignment to an attribute when its graph has run, and no node tells of it: ops on the whole
value that come after the assignment would run on what the value held before. So an assignment to what a tensor
subclass is made of breaks a graph that is meant for this pass. It happens between two graphs, and the second one sees
it. PyTorch's own backends keep Dynamo's way.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from desugar import _torch as private
from subclasses._torch import is_traceable_wrapper_subclass


def break_at_assignments(backend: Callable[..., Any]) -> None:
    """Makes Dynamo break graphs for `backend` where an attribute of a tensor subclass gets another value."""
    note = private.SideEffects.store_attr

    @functools.wraps(note)
    def store_attr(effects: Any, item: Any, name: str, *args: Any, **kwargs: Any) -> None:
        value = wrapper_of(item)
        if (
            value is not None
            and _is_part(value, name)
            and backend_of(effects.output_graph_weakref()) is backend
        ):
            kind = type(value).__name__
            private.unimplemented(
                gb_type="desugar: assigning to a part of a tensor subclass",
                context=f"{kind}.{name} = ...",
                explanation=f"Dynamo's graph does not hold that {name} of a {kind} is replaced, so ops after it would "
                "run on the old one.",
                hints=[f"Without fullgraph=True the graph ends here, and the next one sees the new {name}."],
            )
        note(effects, item, name, *args, **kwargs)

    private.SideEffects.store_attr = store_attr


def wrapper_of(item: Any) -> Tensor | None:
    """The fake value that one of Dynamo's variables stands for, if that is a tensor subclass which wraps tensors."""
    proxy = getattr(item, "proxy", None)
    value = proxy.node.meta.get("example_value") if proxy is not None else None
    return value if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value) else None  # type: ignore[return-value]


def _is_part(value: Tensor, name: str) -> bool:
    """Whether an attribute is there already, as inner tensors and metadata are; of others the pass knows nothing."""
    return name in value.__dict__ or name in value.__tensor_flatten__()[0]  # type: ignore[attr-defined]


def backend_of(graph: Any) -> object:
    """The function that a graph in the making goes to."""
    given = inspect.unwrap(graph.compiler_fn) if graph is not None else None
    return getattr(given, "compiler_fn", given)
