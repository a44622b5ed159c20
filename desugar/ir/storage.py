"""Finds tensors that share memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from subclasses._torch import storage_key


def base_of(tensor: Any) -> Any:
    """Returns the base of a view; for any other tensor, the tensor itself."""
    return tensor._base if tensor._is_view() else tensor


def may_overlap(one: Tensor, other: Tensor) -> bool:
    """Returns whether two plain tensors share a storage and span byte ranges of it that overlap."""
    if storage_key(one) != storage_key(other):
        return False
    (start, end), (other_start, other_end) = _span(one), _span(other)
    return start < other_end and other_start < end


def _span(tensor: Tensor) -> tuple[int, int]:
    """Returns the half-open range of bytes that a tensor spans in its storage; empty for a tensor of no elements."""
    width, start = tensor.element_size(), int(tensor.storage_offset())
    if tensor.numel() == 0:
        return start * width, start * width
    extents = zip(tensor.size(), tensor.stride(), strict=True)
    last = start + sum((int(size) - 1) * int(stride) for size, stride in extents)
    return start * width, (last + 1) * width


def are_apart(written: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    """Returns whether no mutated tensor overlaps another mutated tensor or one of the others.

    Args:
        written: The tensors that the function mutates.
        others: The other tensors.
    """
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in others:
        by_storage.setdefault(storage_key(tensor), []).append(tensor)
    for tensor in written:
        near = by_storage.setdefault(storage_key(tensor), [])
        if any(may_overlap(tensor, other) for other in near):
            return False
        near.append(tensor)
    return True
