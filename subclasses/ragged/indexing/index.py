"""An index written out: an entry for each dimension, and what kind of index it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.base import RaggedTensor, shown

ALL = slice(None)


def expanded(x: Any, index: Any) -> tuple[Any, ...]:
    """The index with an entry for each dimension, its ellipsis written out."""
    index = as_tuple(index)
    masks = [i for i in index if isinstance(i, Tensor) and i.dtype == torch.bool and i.dim() > 1]
    if len(index) == len(masks) == 1 and not x.rows_first:
        raise DispatchError(
            f"indexing {shown(x)} by {shown(masks[0])}: a mask of entries is a PaddedTensor with the same rows"
        )
    if any(isinstance(i, RaggedTensor | bool) for i in index):
        raise DispatchError(
            f"indexing {shown(x)}: expected ints, slices, None, lists and dense tensors, got {index}"
        )
    used = sum(i is not None and i is not Ellipsis for i in index)
    if used > x.dim():
        raise IndexError(f"too many indices for {shown(x)}: {index}")
    dots = next((p for p, i in enumerate(index) if i is Ellipsis), len(index))
    return (*index[:dots], *[ALL] * (x.dim() - used), *index[dots + 1 :])


def as_tuple(index: Any) -> tuple[Any, ...]:
    """An index of one dimension or several."""
    return index if isinstance(index, tuple) else (index,)


def outer_places(index: tuple[Any, ...]) -> list[int]:
    """For each dimension the place of its entry in an expanded index."""
    return [p for p, i in enumerate(index) if i is not None]


def replaced(index: tuple[Any, ...], place: int, i: Any) -> tuple[Any, ...]:
    """An index with another entry at one place."""
    return (*index[:place], i, *index[place + 1 :])


def without_place(index: tuple[Any, ...], place: int) -> tuple[Any, ...]:
    """An index for a tensor without one dimension."""
    return (*index[:place], *index[place + 1 :])


def is_all(i: Any) -> bool:
    """Whether all of a dimension is meant."""
    return isinstance(i, slice) and i == ALL


def is_int(i: Any) -> bool:
    """Whether the dimension goes."""
    return isinstance(i, int | torch.SymInt) or (
        isinstance(i, Tensor) and i.dim() == 0 and i.dtype != torch.bool
    )


def is_index(i: Any) -> bool:
    """Whether several are picked, by number or mask."""
    return isinstance(i, list | tuple | range) or (isinstance(i, Tensor) and i.dim() > 0)


# ---- index tensors ---------------------------------------------------------------------------------------------


def row_numbers(x: Any, which: Any) -> Tensor:
    """The numbers of rows that an index tensor ``[n]``, a list or a mask ``[B]`` picks."""
    which = torch.as_tensor(which, device=x.counts.device)
    if which.dim() != 1 or which.is_floating_point():
        raise DispatchError(f"indexing {shown(x)}: expected rows as an int, a slice, a list or a tensor [n]")
    return which.nonzero().squeeze(1) if which.dtype == torch.bool else which


def common_places(x: Any, places: Any) -> Tensor:
    """Places ``[n]`` that are meant for every row."""
    places = torch.as_tensor(places, device=x.counts.device)
    if places.dim() != 1 or places.dtype == torch.bool or places.is_floating_point():
        raise DispatchError(
            f"indexing {shown(x)}: expected places of every row as a list or an int tensor [n]"
        )
    return places


def existing_places(x: Any, rows: Tensor, places: Tensor) -> Tensor:
    """Places of rows, which must have them, counted from the front; nothing waits for a GPU."""
    lengths = x.counts[rows]
    reached = ((places < lengths) & (places >= -lengths)).all()
    torch.ops.aten._assert_async.msg(reached, f"indexing {shown(x)}: a row is too short")
    return torch.where(places < 0, lengths + places, places)
