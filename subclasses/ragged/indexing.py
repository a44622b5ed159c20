"""Indexing: rows, entries of every row, features; what a loop over the rows would give for each row.

A slice of rows, or of every row, shares the values: only what says where the rows lie is new. Negative bounds count
from each row's own end.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.checks import check_has_rows
from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.rows import check_rows_match, entries_of, first_ragged, relaid, shown
from subclasses.ragged.sharing import sharing
from subclasses.ragged.splitting import chunk_rows, implement_tensor_split

aten = torch.ops.aten

# ---- the rules -------------------------------------------------------------------------------------------------


@JaggedTensor.implements(torch.Tensor.__getitem__)
def _(func: Any, x: Any, index: Any) -> Any:
    if not isinstance(x, JaggedTensor):
        raise DispatchError(
            f"indexing {shown(x)} by {shown(index)}: index by index.unwrap('values'), or to_dense()"
        )
    if isinstance(index, JaggedTensor):
        return _pick_entries(func, x, index)
    index = _expanded(x, index if isinstance(index, tuple) else (index,))
    index = tuple(
        int(i) if isinstance(i, Tensor) and i.dim() == 0 and i.dtype != torch.bool else i for i in index
    )
    return _features(x, index) if x.ragged_dim == 0 else _of_rows(x, index)


def _of_rows(x: JaggedTensor, index: tuple[Any, ...]) -> Any:
    """An index of rows, entries and features."""
    rows, rest = index[0], index[1:]
    if rows is None:
        raise DispatchError(f"indexing {shown(x)}: the batch dimension stays first, got {index}")
    place, entries = _find_ragged(x, rest)
    if _is_index(rows) and _is_index(entries):
        return take_pairs(x, rows, entries, rest)
    if isinstance(rows, int):
        return select_row(x, rows)[rest]
    if not _is_all(rows):
        x = take_rows(x, rows)
    if _is_index(entries):
        picked = take_places(x, entries)
        return picked[(slice(None), *rest[:place], slice(None), *rest[place + 1 :])]
    if isinstance(entries, int):
        picked = select_position(x, entries)
        return picked[(slice(None), *rest[:place], *rest[place + 1 :])]
    if not _is_all(entries):
        x = slice_rows(x, entries)
    return _features(x, (slice(None), *rest[:place], slice(None), *rest[place + 1 :]))


@JaggedTensor.implements(torch.select)
def _(func: Any, x: Any, dim: int, index: int) -> Any:
    dim = dim % x.dim()
    if x.ragged_dim == 0 or dim not in (0, x.ragged_dim):
        return JaggedTensor.unruled(func, x, dim, index)
    return select_row(x, index) if dim == 0 else select_position(x, index)


@JaggedTensor.implements(torch.narrow)
def _(func: Any, x: Any, dim: int, start: int, length: int) -> Any:
    return x[(*[slice(None)] * (dim % x.dim()), slice(start, start + length))]


@JaggedTensor.implements(torch.unbind)
def _(func: Any, x: Any, dim: int = 0) -> Any:
    if dim % x.dim() or x.ragged_dim == 0:
        return JaggedTensor.unruled(func, x, dim)
    return tuple(x.to_tensors())


@JaggedTensor.implements(torch.Tensor.__iter__)
def _(func: Any, x: Any) -> Any:
    return iter(x.to_tensors() if x.ragged_dim else x.entries())


@JaggedTensor.implements(torch.masked_select)
def _(func: Any, input: Any, mask: Any) -> Any:
    if not isinstance(input, JaggedTensor) or not isinstance(mask, JaggedTensor):
        x = first_ragged((input, mask))
        input, mask = (
            t if isinstance(t, JaggedTensor) else entries_of(x, t.expand(x.shape)) for t in (input, mask)
        )
    return _pick_entries(func, input, mask)


@JaggedTensor.implements(torch.chunk)
def _(func: Any, input: Any, chunks: int, dim: int = 0) -> Any:
    if dim % input.dim() != input.ragged_dim or input.ragged_dim == 0:
        return _cut_rows(func, input, chunks, dim)
    if chunks < 1:
        raise RuntimeError(f"{func.__name__}: expected at least 1 chunk, got {chunks}")
    return chunk_rows(cut, input, input.row_lengths(), input.max_length, chunks)


@JaggedTensor.implements(torch.split)
def _(func: Any, tensor: Any, split_size_or_sections: Any, dim: int = 0) -> Any:
    return _cut_rows(func, tensor, split_size_or_sections, dim)


def _cut_rows(func: Any, x: JaggedTensor, size: Any, dim: int) -> Any:
    """Groups of rows that share the values; along another dimension the op itself."""
    if x.ragged_dim == 0 or dim % x.dim():
        return JaggedTensor.unruled(func, x, size, dim)
    parts = func(torch.arange(x.offsets.shape[0] - 1), size)
    stops = list(accumulate(len(part) for part in parts))
    return tuple(take_rows(x, slice(stop - len(part), stop)) for stop, part in zip(stops, parts, strict=True))


# ---- rows ------------------------------------------------------------------------------------------------------


def select_row(x: JaggedTensor, row: int) -> Tensor:
    """One row, dense: a view of the values."""
    check_has_rows(x, "select")
    count = x.offsets.shape[0] - 1
    if not -count <= row < count:
        raise IndexError(f"index {row} is out of bounds for the {count} rows of {shown(x)}")
    row = row % count
    start, n = int(x.offsets[row]), int(x.row_lengths()[row])
    return x.unwrap("values").narrow(x.ragged_dim - 1, start, n)


def take_rows(x: JaggedTensor, which: Any) -> JaggedTensor:
    """Some rows: a slice shares the values, an index tensor or mask copies the rows."""
    check_has_rows(x, "indexing")
    starts, lengths = x.offsets[:-1], x.row_lengths()
    if isinstance(which, slice):
        if which.step not in (None, 1):
            which = torch.arange(starts.shape[0], device=starts.device)[which]
        else:
            offsets = torch.cat([starts[which], x.offsets[-1:]])
            return sharing(_rebuilt(x, x.unwrap("values"), offsets, lengths[which]), x)
    which = torch.as_tensor(which, device=starts.device)
    if which.dim() != 1:
        raise DispatchError(f"indexing {shown(x)}: expected rows as an int, a slice, a list or a tensor [n]")
    which = which.nonzero().squeeze(1) if which.dtype == torch.bool else which
    starts, lengths = starts[which], lengths[which]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    index = torch.repeat_interleave(starts - offsets[:-1], lengths)
    index = index + torch.arange(index.shape[0], device=index.device)
    return _rebuilt(x, x.unwrap("values").index_select(x.ragged_dim - 1, index), offsets, None)


def slice_rows(x: JaggedTensor, part: slice) -> JaggedTensor:
    """The same slice of every row, which shares the values."""
    if part.step not in (None, 1):
        raise DispatchError(f"indexing {shown(x)}: rows are cut with step 1, got {part}")
    lengths = x.row_lengths()
    first = _bound(part.start, 0, lengths)
    last = torch.maximum(_bound(part.stop, None, lengths), first)
    signs = {(n or 0) < 0 for n in (part.start, part.stop)}
    width = x.max_length if len(signs) == 2 and part.start else len(range(x.max_length)[part])
    return cut(x, first, last - first, width)


def cut(x: JaggedTensor, first: Tensor, lengths: Tensor, width: Any) -> JaggedTensor:
    """The entries of each row from ``first [B]`` on, ``lengths [B]`` of them, which share the values."""
    offsets = torch.cat([x.offsets[:-1] + first, x.offsets[-1:]])
    return sharing(_rebuilt(x, x.unwrap("values"), offsets, lengths, width), x)


implement_tensor_split(JaggedTensor, cut, lambda x: (0, x.ragged_dim, x.row_lengths()), shown)


def _bound(bound: int | None, default: int | None, lengths: Tensor) -> Tensor:
    """Where a slice's bound lies in each row."""
    if bound is None:
        return lengths if default is None else torch.zeros_like(lengths)
    return (lengths + bound if bound < 0 else torch.full_like(lengths, bound)).clamp(min=0).minimum(lengths)


def _rebuilt(
    x: JaggedTensor, values: Tensor, offsets: Tensor, lengths: Tensor | None, width: Any = None
) -> JaggedTensor:
    width = x.max_length if width is None else width
    return type(x)(values, offsets, lengths=lengths, ragged_dim=x.ragged_dim, max_length=width)


# ---- entries ---------------------------------------------------------------------------------------------------


def select_position(x: JaggedTensor, position: int) -> Tensor:
    """The entry at one place of every row, dense: ``[B, ...]``; a negative place counts from each row's end.

    Raises:
        IndexError: a row is too short (on CUDA, and in graphs, by an assertion that nothing waits for).
    """
    lengths = x.row_lengths()
    reached = lengths > position if position >= 0 else lengths >= -position
    message = f"position {position} of every row: a row of the ragged tensor is too short"
    if torch.compiler.is_compiling() or type(reached) is not Tensor or reached.is_cuda:
        torch.ops.aten._assert_async.msg(reached.all(), message)
    elif not reached.all():
        short = (~reached).nonzero().squeeze(1).tolist()
        raise IndexError(f"index {position} is out of bounds for rows {short} of {shown(x)}")
    index = x.offsets[:-1] + (position if position >= 0 else lengths + position)
    return x.unwrap("values").index_select(x.ragged_dim - 1, index).movedim(x.ragged_dim - 1, 0)


def take_places(x: JaggedTensor, places: Any) -> Tensor:
    """The entries at some places of every row, dense: the ragged dimension has as many."""
    places = torch.as_tensor(places, device=x.offsets.device)
    if places.dim() != 1 or places.dtype == torch.bool:
        raise DispatchError(
            f"indexing {shown(x)}: expected places of every row as a list or an int tensor [n]"
        )
    rows = torch.arange(x.offsets.shape[0] - 1, device=places.device)
    index = _entries_of(x, rows.unsqueeze(1), places)
    values, place = x.unwrap("values"), x.ragged_dim - 1
    return values.index_select(place, index.flatten()).unflatten(place, index.shape).movedim(place, 0)


def take_pairs(x: JaggedTensor, rows: Any, entries: Any, rest: tuple[Any, ...]) -> Tensor:
    """Single entries, by the number of the row and the place in it: dense."""
    if x.ragged_dim != 1 and not all(_is_index(i) for i in rest):
        raise DispatchError(
            f"indexing {shown(x)}: index tensors for rows and places follow each other, or are there for all dimensions"
        )
    pair = [torch.as_tensor(i, device=x.offsets.device) for i in (rows, entries)]
    if torch.bool in (pair[0].dtype, pair[1].dtype):
        raise DispatchError(f"indexing {shown(x)}: index by one ragged mask, or by two index tensors of ints")
    place = x.ragged_dim - 1
    return x.unwrap("values")[(*rest[:place], _entries_of(x, *pair), *rest[place + 1 :])]


def _entries_of(x: JaggedTensor, rows: Tensor, places: Tensor) -> Tensor:
    """The entries at places of rows, which must have them; negative ones count from the end."""
    lengths = x.row_lengths()[rows]
    reached = ((places < lengths) & (places >= -lengths)).all()
    torch.ops.aten._assert_async.msg(reached, f"indexing {shown(x)}: a row is too short")
    return x.offsets[:-1][rows] + torch.where(places < 0, lengths + places, places)


def _pick_entries(func: Any, x: JaggedTensor, mask: JaggedTensor) -> JaggedTensor:
    """What a ragged mask picks of each row, again ragged."""
    if mask.dtype != torch.bool or x.ragged_dim > 1 or mask.ragged_dim != x.ragged_dim:
        raise DispatchError(f"indexing {shown(x)}: expected a bool mask of the same rows, got {shown(mask)}")
    check_rows_match(func, x, mask)
    mask = relaid(func, _empty_like(x, mask), mask)
    picked = x.segments.keep(mask.values, False)
    counts = x.segments.sum_rows(picked.flatten(1).sum(1) if picked.dim() > 1 else picked)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return type(x)(x.unwrap("values")[picked], offsets, ragged_dim=min(x.ragged_dim, 1))


def _empty_like(x: JaggedTensor, mask: JaggedTensor) -> JaggedTensor:
    """A value with the rows of ``x`` and as many dimensions as the mask."""
    return x if x.dim() == mask.dim() else x.with_values(mask.values)


def _features(x: JaggedTensor, index: tuple[Any, ...]) -> Any:
    """Slices, ints and None at dimensions that are neither batch nor ragged."""
    if sum(_is_index(i) for i in index) > 1:
        return _pick_together(x, index)
    result, dim = aten.alias.default(x), 0
    for i in index:
        if i is None:
            result = result.unsqueeze(dim)
        elif _is_index(i):
            result = _pick_features(result, dim, i)
        elif not isinstance(i, slice):
            result, dim = aten.select.int(result, dim, i), dim - 1
        elif not _is_all(i):
            result = aten.slice.Tensor(result, dim, i.start, i.stop, 1 if i.step is None else i.step)
        dim += 1
    return result


def _pick_together(x: JaggedTensor, index: tuple[Any, ...]) -> JaggedTensor:
    """Elements by several index tensors for the features."""
    kept = max(x.ragged_dim - 1, 0)
    rest = index[min(x.ragged_dim, 1) :]
    places = [p for p, i in enumerate(rest) if _is_index(i)]
    alone = all(_is_index(i) or _is_all(i) for i in index) and not _is_index(rest[kept])
    if not alone or places != list(range(places[0], places[-1] + 1)):
        raise DispatchError(
            f"indexing {shown(x)}: expected index tensors for features that follow each other, and whole dimensions "
            f"beside them, got {index}"
        )
    found = torch.broadcast_tensors(*(torch.as_tensor(rest[p], device=x.device) for p in places))
    values = x.unwrap("values")[(*rest[: places[0]], *found, *rest[places[-1] + 1 :])]
    moved = found[0].dim() - len(places) if kept > places[0] else 0
    return x.with_values(values, x.ragged_dim + moved)


def _pick_features(x: Any, dim: int, which: Any) -> Any:
    which = torch.as_tensor(which, device=x.device)
    if which.dim() != 1:
        raise DispatchError(f"indexing {shown(x)}: expected one index tensor [n] for the features")
    which = which.nonzero().squeeze(1) if which.dtype == torch.bool else which
    return x.index_select(dim, torch.where(which < 0, which + x.shape[dim], which))


def _is_index(index: Any) -> bool:
    """Whether several are picked by number or mask."""
    return isinstance(index, list | tuple | range) or (isinstance(index, Tensor) and index.dim() > 0)


def _is_all(index: Any) -> bool:
    return isinstance(index, slice) and index == slice(None)


def _expanded(x: JaggedTensor, index: tuple[Any, ...]) -> tuple[Any, ...]:
    """The index with an entry for each dimension: the ellipsis written out."""
    if any(isinstance(i, JaggedTensor | bool) for i in index):
        raise DispatchError(
            f"indexing {shown(x)}: expected ints, slices, None, lists and dense tensors, got {index}"
        )
    used = sum(i is not None and i is not Ellipsis for i in index)
    if used > x.dim():
        raise IndexError(f"too many indices for {shown(x)}: {index}")
    dots = next((p for p, i in enumerate(index) if i is Ellipsis), len(index))
    return (*index[:dots], *[slice(None)] * (x.dim() - used), *index[dots + 1 :])


def _find_ragged(x: JaggedTensor, rest: tuple[Any, ...]) -> tuple[int, Any]:
    """Where in an index after the batch the ragged dimension's stands, and what it is."""
    places = [p for p, i in enumerate(rest) if i is not None]
    place = places[x.ragged_dim - 1]
    return place, rest[place]
