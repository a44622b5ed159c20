"""What generated wrappers call when something is out of the ordinary."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from desugar import _torch as private
from desugar.memory import base_of


def restride(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """The tensor with its memory dense and its dimensions ordered as in `order`, copied only where it is not."""
    permuted = tensor.permute(tuple(order))
    if permuted.is_contiguous():
        return tensor
    inverse = sorted(range(len(order)), key=lambda position: order[position])
    return permuted.contiguous().permute(inverse)


# ------------------------------------------------------------------------------------------ version counters


def note_versions(tensors: Sequence[Tensor]) -> tuple[int | None, ...]:
    """The version counters of tensors that are about to be written; inference tensors have none."""
    return tuple(None if tensor.is_inference() else tensor._version for tensor in tensors)


def raise_versions(tensors: Sequence[Tensor], before: Sequence[int | None], rises: Sequence[int]) -> None:
    """Sets the version counters to what eager mode would have made them, however the writes were done."""
    total: dict[int, int] = {}
    for tensor, rise in zip(tensors, rises, strict=True):  # views of one tensor share its counter
        total[id(base_of(tensor))] = total.get(id(base_of(tensor)), 0) + rise
    found = [
        (tensor, version + total[id(base_of(tensor))])
        for tensor, version in zip(tensors, before, strict=True)
        if version is not None
    ]
    private.set_version_counters(tuple(t for t, _ in found), tuple(v for _, v in found))
