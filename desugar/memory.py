"""Which tensors share memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


def storage_of(tensor: Tensor) -> int:
    """Which memory a tensor speaks of; wrappers that are views of one another share theirs."""
    return tensor.untyped_storage()._cdata


def base_of(tensor: Any) -> Any:
    """What a tensor is a view of, or itself."""
    return tensor._base if tensor._is_view() else tensor


def may_overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two plain tensors share a storage, and the ranges that they span in it meet."""
    if storage_of(one) != storage_of(other):
        return False
    (start, end), (other_start, other_end) = _span(one), _span(other)
    return start < other_end and other_start < end


def _span(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage between a tensor's first and last element."""
    width, start = tensor.element_size(), int(tensor.storage_offset())
    if tensor.numel() == 0:
        return start * width, start * width
    extents = zip(tensor.size(), tensor.stride(), strict=True)
    last = start + sum((int(size) - 1) * int(stride) for size, stride in extents)
    return start * width, (last + 1) * width


def group_by_storage(tensors: Iterable[Tensor]) -> dict[int, list[Tensor]]:
    """Storage -> the tensors in it."""
    groups: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(storage_of(tensor), []).append(tensor)
    return groups


def are_apart(
    written: tuple[Tensor, ...],
    others: tuple[Tensor, ...],
    held_written: Mapping[int, list[Tensor]],
    held_others: Mapping[int, list[Tensor]],
) -> bool:
    """Whether no tensor that is written to shares memory with another.

    Args:
        written: Arguments that are written to.
        others: The other arguments.
        held_written: Captured tensors that are written to, by storage; known to be apart from one another.
        held_others: The other captured tensors.
    """
    for n, tensor in enumerate(written):
        near = [*held_written.get(storage_of(tensor), ()), *held_others.get(storage_of(tensor), ())]
        if any(may_overlap(tensor, other) for other in (*written[:n], *others, *near)):
            return False
    return not any(
        may_overlap(tensor, other) for other in others for tensor in held_written.get(storage_of(other), ())
    )


def whole_storage(tensor: Tensor) -> Tensor:
    """All of a tensor's storage as one row of its dtype."""
    storage = tensor.untyped_storage()
    with torch.no_grad():
        blank = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return blank.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))  # type: ignore[arg-type]


def lie_alike(tensors: tuple[Tensor, ...], offsets: tuple[int, ...], nbytes: int) -> bool:
    """Whether tensors are in one storage of that many bytes, at these offsets."""
    storage = storage_of(tensors[0])
    return tensors[0].untyped_storage().nbytes() == nbytes and all(
        storage_of(tensor) == storage and tensor.storage_offset() == offset
        for tensor, offset in zip(tensors, offsets, strict=True)
    )
