"""What a value of a declared class is made of: its inner tensors, and the carriers of its dynamic ints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import is_traceable_wrapper_subclass, mark_dim_dynamic
from subclasses.spec.collect import InnerField


def rebuild(x: Any, change: Callable[[InnerField, Any], Any]) -> Any:
    """The same value with each inner tensor that is there replaced by what ``change`` makes of it."""
    spec, values = type(x).__spec__, x.__dict__
    inners = [None if values[f.name] is None else change(f, values[f.name]) for f in spec.inners]
    return type(x)._wrap(x._layout, *inners, *(values[f.name] for f in spec.dynamics))


def carrier(name: str) -> str:
    """The attribute of the zero-element tensor whose extent carries a dynamic int."""
    return f"_{name}_carrier"


def make_carrier(x: Any, count: int) -> Tensor:
    """A zero-element tensor whose extent carries a dynamic int to where only tensors go."""
    like = next((x.__dict__[n] for n in x._layout.present), None)
    while like is not None and is_traceable_wrapper_subclass(like):
        like = getattr(like, like.__tensor_flatten__()[0][0])
    if like is None:
        return torch.empty((count, 0), dtype=torch.uint8, device=x.device)
    tensor = like.new_empty((count, 0), dtype=torch.uint8)
    if type(tensor) is Tensor:
        mark_dim_dynamic(tensor)
    return tensor
