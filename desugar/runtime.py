"""What generated wrappers call when something is out of the ordinary."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def restride(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """The tensor with its memory dense and its dimensions ordered as in `order`, copied only where it is not."""
    permuted = tensor.permute(tuple(order))
    if permuted.is_contiguous():
        return tensor
    inverse = sorted(range(len(order)), key=lambda position: order[position])
    return permuted.contiguous().permute(inverse)
