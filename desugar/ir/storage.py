"""Which tensors share memory."""

from __future__ import annotations

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


def are_apart(written: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    """Whether no tensor that is written to shares memory with another.

    Args:
        written: Tensors that are written to.
        others: The other tensors.
    """
    return not any(
        may_overlap(tensor, other) for n, tensor in enumerate(written) for other in (*written[:n], *others)
    )


def whole_storage(tensor: Tensor) -> Tensor:
    """All of a tensor's storage as one row of its dtype."""
    storage = tensor.untyped_storage()
    with torch.no_grad():
        blank = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return blank.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))  # type: ignore[arg-type]
