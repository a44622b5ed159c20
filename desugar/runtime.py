"""What generated wrappers call when something is out of the ordinary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from desugar.errors import DesugarError


def refuse_double_backward() -> None:
    """Raises: the backward of a compiled program is not differentiable yet."""
    raise DesugarError(
        "double backward (create_graph=True) through a desugared program is not supported yet",
        instead="run the function in eager mode where second derivatives are needed",
    )


def refuse_tangent(tangent: Any, expected: Any) -> bool:
    """Raises if a tangent is not what the backward was compiled for; True for a harmless subtype of Tensor."""
    if expected is Tensor and isinstance(tangent, Tensor) and not hasattr(tangent, "__tensor_flatten__"):
        return True
    wanted = (
        expected.__name__
        if isinstance(expected, type)
        else "the non-differentiable inner tensor of the result"
    )
    raise DesugarError(
        f"the backward was compiled for a {wanted} tangent, got a {type(tangent).__name__} "
        f"of size {tuple(tangent.shape)} with other metadata",
        instead="pass a gradient of the result's own type and metadata",
    )


def restride(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """The tensor with its memory dense and its dimensions ordered as in `order`, copied only where it is not."""
    permuted = tensor.permute(tuple(order))
    if permuted.is_contiguous():
        return tensor
    inverse = sorted(range(len(order)), key=lambda position: order[position])
    return permuted.contiguous().permute(inverse)
