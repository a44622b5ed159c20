"""Forward-mode differentiation (``torch.autograd.forward_ad``), which ops on wrappers do not take part in.

An op reaches a wrapper below autograd, where a tangent of an inner tensor would be dropped without a word.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from subclasses._torch import autograd_enabled
from subclasses.dispatch.fallbacks import wrappers_in
from subclasses.errors import DispatchError, one_of
from subclasses.layout import RAW

# It drops tangents, of plain tensors too.
_DROPPING = torch.ops.aten.detach.default


def check_no_tangents(cls: Any, func: Any, args: Any, kwargs: Any) -> None:
    """Raises DispatchError if an inner tensor of an operand is a dual tensor; asked in a dual level only."""
    if func is _DROPPING:
        return
    for x in wrappers_in(cls, (args, kwargs or {})):
        for name in x._layout.present:
            t = x.__dict__[name]
            if type(t) is Tensor and _has_tangent(t):
                raise DispatchError(
                    f"{func} on {one_of(cls)} whose {name.removeprefix(RAW)} is a dual tensor of torch.autograd."
                    f"forward_ad: an op on the value would lose the tangent; compute with x.unwrap() or "
                    f"x.materialize(), in a rule for the function if need be, or differentiate with "
                    f"torch.autograd.grad"
                )


def _has_tangent(t: Tensor) -> bool:
    with autograd_enabled():  # where an op on a wrapper is dispatched, tensors tell nothing of it
        return forward_ad.unpack_dual(t).tangent is not None
