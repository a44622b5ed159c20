"""Indexing: by ints, slices, index tensors and masks, as in a loop over the rows.

What reads lengths, here and nowhere else: a row as a plain tensor of its own size (``x[0]``, ``x.unbind()``, a loop).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.padded import checks
from subclasses.ragged.padded.cutting import (
    cut,
    select_position,
    select_row,
    slice_rows,
    take_positions,
    take_rows,
)
from subclasses.ragged.padded.picking import pick
from subclasses.ragged.padded.rows import as_padded, first_padded, outer_dims, rows_stay, shown
from subclasses.ragged.padded.tensor import PaddedTensor
from subclasses.ragged.splitting import chunk_rows

aten = torch.ops.aten

ALL = slice(None)

# ---- the rules -------------------------------------------------------------------------------------------------


@PaddedTensor.implements(torch.Tensor.__getitem__)
def _(func: Any, x: Any, index: Any) -> Any:
    if not isinstance(x, PaddedTensor):
        raise DispatchError(f"indexing {shown(x)} by {shown(first_padded(_as_tuple(index)))}; use to_dense()")
    if isinstance(index, PaddedTensor):
        return pick(func, x, index)
    index = expanded(x, index)
    places = outer_places(index)
    at_batch, at_ragged = places[x.batch_dim], places[x.ragged_dim]
    if x.merged:
        check_whole(x, index[at_batch])
        return _take_features(x, index)
    rows, entries = index[at_batch], index[at_ragged]
    if is_index(rows) and is_index(entries):
        return _take_pairs(x, rows, entries, index)
    if is_int(rows):
        return select_row(x, rows)[without_place(index, at_batch)]
    x = x if is_all(rows) else take_rows(x, rows)
    index = replaced(index, at_batch, ALL)
    if is_int(entries):
        return select_position(x, entries)[without_place(index, at_ragged)]
    if isinstance(entries, slice):
        x = x if is_all(entries) else slice_rows(x, entries)
        return _take_features(x, replaced(index, at_ragged, ALL))
    found = torch.as_tensor(entries, device=x.lengths.device)
    return take_positions(x, _of_every_row(x, found))[replaced(index, at_ragged, ALL)]


@PaddedTensor.implements(torch.select)
def _(func: Any, x: Any, dim: int, index: int) -> Any:
    (dim,) = outer_dims(func, x, dim)
    return PaddedTensor.unruled(func, x, dim, index) if rows_stay(x, [dim]) else x[along(dim, index)]


@PaddedTensor.implements(torch.narrow)
def _(func: Any, x: Any, dim: int, start: int, length: int) -> Any:
    (dim,) = outer_dims(func, x, dim)
    stop = None if start < 0 and start + length == 0 else start + length
    return x[along(dim, slice(start, stop))]


@PaddedTensor.implements(torch.index_select)
def _(func: Any, input: Any, dim: int, index: Tensor) -> Any:
    (dim,) = outer_dims(func, input, dim)
    if rows_stay(input, [dim]):
        return input.with_padded(func(input.unwrap("padded"), dim, index))
    return input[along(dim, index)]


@PaddedTensor.implements(torch.unbind)
def _(func: Any, x: Any, dim: int = 0) -> Any:
    (dim,) = outer_dims(func, x, dim)
    if dim != x.batch_dim or x.merged:
        return PaddedTensor.unruled(func, x, dim)
    return tuple(x.to_tensors())


@PaddedTensor.implements(torch.Tensor.__iter__)
def _(func: Any, x: Any) -> Any:
    return iter(x.unbind(0))


@PaddedTensor.implements(torch.chunk)
def _(func: Any, input: Any, chunks: int, dim: int = 0) -> Any:
    (dim,) = outer_dims(func, input, dim)
    if chunks < 1:
        raise RuntimeError(f"{func.__name__}: expected at least 1 chunk, got {chunks}")
    if dim == input.ragged_dim and not input.merged:
        return chunk_rows(cut, input, input.counts, input.width, chunks)
    return _split(func, input, chunks, dim)


@PaddedTensor.implements(torch.split)
def _(func: Any, tensor: Any, split_size_or_sections: Any, dim: int = 0) -> Any:
    (dim,) = outer_dims(func, tensor, dim)
    if dim == tensor.ragged_dim and not isinstance(split_size_or_sections, int):
        raise DispatchError(
            f"{func.__name__}: rows of {shown(tensor)} have other lengths than the sections {split_size_or_sections}"
        )
    return _split(func, tensor, split_size_or_sections, dim)


def _split(func: Any, x: PaddedTensor, size: Any, dim: int) -> Any:
    """Parts of equal extent along the rows, or of as many rows; along another dimension the op itself."""
    if rows_stay(x, [dim]) or x.merged:
        return PaddedTensor.unruled(func, x, size, dim)
    stops, stop = [], 0
    for part in func(torch.empty(x.shape[dim], device="meta"), size):
        stops.append((stop, stop + part.shape[0]))
        stop += part.shape[0]
    return tuple(x[along(dim, slice(a, b))] for a, b in stops)


# ---- places by index tensors -----------------------------------------------------------------------------------


def _of_every_row(x: PaddedTensor, places: Tensor) -> Tensor:
    """Places ``[n]`` as ``[B, n]``."""
    if places.dim() != 1 or places.dtype == torch.bool or places.is_floating_point():
        raise DispatchError(
            f"indexing {shown(x)}: expected places of every row as a list or an int tensor [n]"
        )
    return places.expand(x.lengths.shape[0], -1)


def _take_pairs(x: PaddedTensor, rows: Any, entries: Any, index: tuple[Any, ...]) -> Tensor:
    """Single entries, by the number of the row and the place in it: dense."""
    if not all(is_index(i) or is_all(i) for i in index):
        raise DispatchError(f"indexing {shown(x)}: index tensors stand beside whole dimensions, got {index}")
    places = outer_places(index)
    rows, entries = settled_pairs(x, rows, entries)
    index = replaced(replaced(index, places[x.batch_dim], rows), places[x.ragged_dim], entries)
    return x.unwrap("padded")[index]


def settled_pairs(x: PaddedTensor, rows: Any, entries: Any) -> tuple[Tensor, Tensor]:
    """Rows and places counted from the front, which must exist."""
    rows, entries = (torch.as_tensor(i, device=x.lengths.device) for i in (rows, entries))
    if torch.bool in (rows.dtype, entries.dtype):
        raise DispatchError(f"indexing {shown(x)}: index by one mask [B, T], or by two index tensors of ints")
    lengths = x.counts[rows]
    found = (entries < lengths) & (entries >= -lengths)
    torch.ops.aten._assert_async.msg(found.all(), f"indexing {shown(x)}: a row is too short")
    rows, entries = torch.broadcast_tensors(rows, torch.where(entries < 0, lengths + entries, entries))
    return torch.where(rows < 0, rows + x.lengths.shape[0], rows), entries


# ---- features --------------------------------------------------------------------------------------------------


def _take_features(x: PaddedTensor, index: tuple[Any, ...]) -> Any:
    """Slices, ints, None and index tensors at dimensions of the entries, one after the other."""
    result, dim = aten.alias.default(x), 0
    for i in index:
        if i is None:
            result = result.unsqueeze(dim)
        elif is_int(i):
            result, dim = aten.select.int(result, dim, i), dim - 1
        elif isinstance(i, slice):
            step = 1 if i.step is None else i.step
            result = result if is_all(i) else aten.slice.Tensor(result, dim, i.start, i.stop, step)
        else:
            result = _pick_features(as_padded(result), dim, i, sum(is_index(j) for j in index))
        dim += 1
    return result


def _pick_features(x: PaddedTensor, dim: int, which: Any, count: int) -> PaddedTensor:
    which = torch.as_tensor(which, device=x.device)
    if which.dim() != 1 or count > 1:
        raise DispatchError(f"indexing {shown(x)}: expected one index tensor [n] for the features")
    which = which.nonzero().squeeze(1) if which.dtype == torch.bool else which
    return as_padded(x.index_select(dim, torch.where(which < 0, which + x.shape[dim], which)))


# ---- an index, written out -------------------------------------------------------------------------------------


def _as_tuple(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def expanded(x: PaddedTensor, index: Any) -> tuple[Any, ...]:
    """The index with an entry for each dimension: the ellipsis written out, dense masks of the rows not."""
    index = _as_tuple(index)
    if (
        len(index) == 1
        and isinstance(index[0], Tensor)
        and index[0].dtype == torch.bool
        and index[0].dim() > 1
    ):
        raise DispatchError(
            f"indexing {shown(x)} by {shown(index[0])}: a mask of entries is a PaddedTensor with the same rows"
        )
    if any(isinstance(i, PaddedTensor | bool) for i in index):
        raise DispatchError(
            f"indexing {shown(x)}: expected ints, slices, None, lists and dense tensors, got {index}"
        )
    used = sum(i is not None and i is not Ellipsis for i in index)
    if used > x.dim():
        raise IndexError(f"too many indices for {shown(x)}: {index}")
    dots = next((p for p, i in enumerate(index) if i is Ellipsis), len(index))
    return (*index[:dots], *[ALL] * (x.dim() - used), *index[dots + 1 :])


def outer_places(index: tuple[Any, ...]) -> list[int]:
    """For each dimension where its index stands."""
    return [p for p, i in enumerate(index) if i is not None]


def along(dim: int, i: Any) -> tuple[Any, ...]:
    """An index of one dimension."""
    return (*[ALL] * dim, i)


def replaced(index: tuple[Any, ...], place: int, i: Any) -> tuple[Any, ...]:
    """An index with another at one place."""
    return (*index[:place], i, *index[place + 1 :])


def without_place(index: tuple[Any, ...], place: int) -> tuple[Any, ...]:
    """An index for what has a dimension less."""
    return (*index[:place], *index[place + 1 :])


def is_all(i: Any) -> bool:
    """Whether all of a dimension is asked for."""
    return isinstance(i, slice) and i.start in (None, 0) and i.stop is None and i.step in (None, 1)


def is_int(i: Any) -> bool:
    """Whether a dimension goes."""
    return isinstance(i, int | torch.SymInt) or (
        isinstance(i, Tensor) and i.dim() == 0 and i.dtype != torch.bool
    )


def is_index(i: Any) -> bool:
    """Whether several are picked by number or mask."""
    return isinstance(i, list | tuple | range) or (isinstance(i, Tensor) and i.dim() > 0)


def check_whole(x: PaddedTensor, i: Any) -> None:
    """Raises where merged dimensions are cut."""
    if not is_all(i):
        raise DispatchError(f"indexing {shown(x)}: merged dimensions stay whole; {checks.UNMERGE}")
