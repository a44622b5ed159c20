"""Errors of forward-mode differentiation (``torch.autograd.forward_ad``), which ops on wrappers do not support.

An op reaches a wrapper below autograd, where a tangent of an inner tensor would be dropped without an error.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from subclasses._torch import OpOverload, autograd_enabled
from subclasses.errors import DispatchError, one_of
from subclasses.layout import RAW
from subclasses.spec.values import tensors_in

IN_FORWARD_MODE = (
    "PyTorch calls it in forward mode (torch.func.jvp, torch.autograd.forward_ad), whose formulas mix values with "
    "plain tensors. Compute with x.unwrap() there, or write a rule for the function of the op, such as torch.mul"
)
# Ops that forward mode calls on a tangent. It also decomposes an op on a zero tangent to prims.
_OF_TANGENTS = frozenset({"is_same_size", "_has_same_storage_numel", "_efficientzerotensor"})
# It drops tangents, of plain tensors too.
_DROPPING = torch.ops.aten.detach.default


def is_of_tangents(op: OpOverload) -> bool:
    """Whether forward mode calls an op on a wrapper."""
    return op.namespace == "prims" or op.overloadpacket.__name__ in _OF_TANGENTS


def check_no_tangents(cls: Any, func: Any, args: Any, kwargs: Any) -> None:
    """Raises DispatchError if an inner tensor of an operand is a dual tensor; called in a dual level only."""
    if func is _DROPPING:
        return
    for x in tensors_in(args, kwargs):
        for name in x._layout.present if isinstance(x, cls) else ():
            t = x.__dict__[name]
            if type(t) is Tensor and _has_tangent(t):
                raise DispatchError(
                    f"{func} on {one_of(cls)} whose {name.removeprefix(RAW)} is a dual tensor of "
                    "torch.autograd.forward_ad: an op on the value would lose the tangent",
                    code="forward-mode",
                    hint="compute with x.unwrap() or x.materialize(), in a rule for the function if need be, or "
                    "differentiate with torch.autograd.grad",
                )


def _has_tangent(t: Tensor) -> bool:
    with autograd_enabled():  # below autograd, `unpack_dual` returns no tangent
        return forward_ad.unpack_dual(t).tangent is not None
