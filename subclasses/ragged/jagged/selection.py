"""Selection from a ``JaggedTensor``: rows, and entries of every row.

A slice of rows, or of every row, shares the values: only offsets and lengths are new. Negative bounds count from the
end of each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subclasses._torch_tracing import is_compiling_here
from subclasses.errors import DispatchError
from subclasses.ragged.base import shown
from subclasses.ragged.checks import check_all_exist, check_has_rows, is_traced
from subclasses.ragged.data_sizes import longest_of, size_of, true_positions
from subclasses.ragged.indexing.index import (
    check_numbers,
    common_positions,
    doing,
    existing_positions,
    is_all,
    is_index,
    row_index,
    shown_index,
)
from subclasses.ragged.indexing.splitting import bound_in_rows, extent_of_slice
from subclasses.ragged.jagged.operands import check_rows_match
from subclasses.ragged.jagged.sharing import copied, sharing
from subclasses.ragged.segments import Segments

if TYPE_CHECKING:
    from subclasses.ragged.jagged import JaggedTensor

# ---- rows ------------------------------------------------------------------------------------------------------


def select_row(x: JaggedTensor, row: Any) -> Tensor:
    """Returns one row, dense: a view of the values."""
    check_has_rows(x, "select")
    count, row = x.offsets.shape[0] - 1 if x.count is None else _read_count(x), int(row)
    if not -count <= row < count:
        raise IndexError(f"index {row} is out of bounds for the {count} rows of {shown(x)}")
    row = row % count
    values, dim = x.unwrap("values"), x.ragged_dim - 1
    if _is_empty(values, dim):  # all rows are empty, so no offset is read
        return values.narrow(dim, 0, 0)
    return _cut_row(values, dim, x.offsets[row].item(), x.counts[row].item())


def _read_count(x: JaggedTensor) -> int:
    """Returns how many rows exist; raises in a trace."""
    if is_traced(x.offsets):
        raise DispatchError(
            f"{shown(x)}: single rows of a JaggedTensor with a count are unknown to a compiled function",
            code="graph-refused",
            hint="x[:, -1] gives an entry of each row, and reductions give a result for each row that exists",
        )
    return int(x.count)  # type: ignore[arg-type]


def _is_empty(values: Tensor, dim: int) -> bool:
    """Returns whether a dimension has no entries, if its extent is known without data."""
    return isinstance(values.shape[dim], int) and values.shape[dim] == 0


def _cut_row(values: Tensor, dim: int, start: Any, length: Any) -> Tensor:
    """Returns one row as a view of the values; a length that is unknown in a trace is the extent of the view."""
    if isinstance(length, torch.SymInt):  # narrow() would create another unknown extent
        return values.split([start, length, values.shape[dim] - start - length], dim)[1]
    return values.narrow(dim, start, length)


def to_tensors(x: JaggedTensor) -> list[Tensor]:
    """Returns the rows, each ``[..., length, ...]``: views of the values."""
    values, dim = x.unwrap("values"), max(x.ragged_dim - 1, 0)
    count = x.offsets.shape[0] - 1 if x.count is None else _read_count(x)
    if _is_empty(values, dim):
        return [values.narrow(dim, 0, 0) for _ in range(count)]
    lengths = x.counts[:count].tolist()
    if x.lengths is None and all(isinstance(n, torch.SymInt) for n in (*lengths, values.shape[dim])):
        return list(values.split(lengths, dim))  # one op, and one cat() for its gradient
    return [_cut_row(values, dim, a, n) for a, n in zip(x.offsets[:-1].tolist(), lengths, strict=False)]


def take_rows(x: JaggedTensor, which: Any) -> JaggedTensor:
    """Returns some rows: a slice shares the values, an index tensor or mask copies the rows."""
    check_has_rows(x, "indexing")
    check_all_exist(x, "indexing rows")
    starts, lengths = x.offsets[:-1], x.counts
    if isinstance(which, slice):
        if which.step in (None, 1):
            offsets = torch.cat([starts[which], x.offsets[-1:]])
            return sharing(_rebuilt(x, x.unwrap("values"), offsets, lengths[which]), x)
        every = torch.arange(starts.shape[0], device=starts.device)[which]
        return copied(take_rows(x, every), x)
    which = row_index(x, which)
    if which.dtype == torch.bool:
        return _take_and_end(x, true_positions(torch.cat([which, which.new_ones(1)])))
    return _copied(x, *(torch.cat([t[which], t.new_zeros(1)]) for t in (starts, lengths)))


def repeat_rows(x: JaggedTensor, repeats: Tensor) -> JaggedTensor:
    """Repeats each row ``repeats [B]`` times."""
    check_all_exist(x, "repeating rows")
    counts = torch.cat([repeats, repeats.new_ones(1)])
    return _take_and_end(x, torch.repeat_interleave(counts, output_size=size_of(counts.sum())))


def _take_and_end(x: JaggedTensor, which: Tensor) -> JaggedTensor:
    """Returns rows by numbers ``[n + 1]``; the last number is the number of rows, for an additional empty row.

    So there are as many numbers as offsets: one symbolic size if only data determines it.
    """
    return _copied(x, *(torch.cat([t, t.new_zeros(1)])[which] for t in (x.offsets[:-1], x.counts)))


def _copied(x: JaggedTensor, starts: Tensor, lengths: Tensor) -> JaggedTensor:
    """Copies rows that begin at ``starts [n + 1]`` of the values, back to back; drops the last one, which is empty."""
    offsets = lengths.cumsum(0) - lengths
    rows = Segments(offsets, None, size_of(offsets[-1]), x.max_length)
    index = rows.spread_rows(starts) + rows.positions
    return _rebuilt(x, x.unwrap("values").index_select(x.ragged_dim - 1, index), offsets, None)


def slice_rows(x: JaggedTensor, part: slice) -> JaggedTensor:
    """Returns the same slice of every row, which shares the values; a step copies the entries."""
    step = 1 if part.step is None else part.step
    if not isinstance(step, int) or step < 1:
        raise DispatchError(
            f"indexing {shown(x)}: expected a positive step along the rows, got {part}",
            code="argument-refused",
            hint=f"x.flip({x.ragged_dim}) reverses each row",
        )
    part = slice(part.start, part.stop)
    lengths = x.counts
    first = torch.zeros_like(lengths) if part.start is None else bound_in_rows(part.start, lengths)
    last = torch.maximum(lengths if part.stop is None else bound_in_rows(part.stop, lengths), first)
    signs = {bool((n or 0) < 0) for n in (part.start, part.stop)}
    width = x.max_length if len(signs) == 2 and part.start else extent_of_slice(x.max_length, part)
    rows = cut(x, first, last - first, width)
    if step == 1:
        return rows
    table = rows.to_dense()[(*[slice(None)] * x.ragged_dim, slice(None, None, step))]
    return copied(x.of_lengths(table, (last - first + step - 1) // step), x)


def cut(x: JaggedTensor, first: Tensor, lengths: Tensor, width: Any) -> JaggedTensor:
    """Returns ``lengths [B]`` entries of each row from ``first [B]`` on; shares the values."""
    offsets = torch.cat([x.offsets[:-1] + first, x.offsets[-1:]])
    return sharing(_rebuilt(x, x.unwrap("values"), offsets, lengths, width), x)


def _rebuilt(
    x: JaggedTensor, values: Tensor, offsets: Tensor, lengths: Tensor | None, width: Any = None
) -> JaggedTensor:
    width = x.max_length if width is None else width
    rows = {"lengths": lengths, "count": x.count, "ragged_dim": x.ragged_dim, "max_length": width}
    return type(x)(values, offsets, **rows)


def rearranged(x: JaggedTensor, source: Callable[[Tensor, Tensor], Tensor]) -> JaggedTensor:
    """Reorders the entries of each row; ``source(place, length)`` returns the position to read an entry from."""
    rows = x.segments
    moves = rows.keep(source(rows.positions, rows.spread_rows(rows.row_lengths)) - rows.positions)
    index = torch.arange(rows.total, device=moves.device) + moves
    return x.with_values(x.unwrap("values").index_select(x.ragged_dim - 1, index))


# ---- entries ---------------------------------------------------------------------------------------------------


def select_position(x: JaggedTensor, position: Any) -> Tensor:
    """Returns the entry at one position of every row: ``[B, ...]``; a negative one counts from the end of each row.

    Raises:
        IndexError: a row is too short (on CUDA and in graphs by an asynchronous assertion).
    """
    lengths, position = x.counts, int(position)
    reached = lengths > position if position >= 0 else lengths >= -position
    if x.count is not None:
        reached = reached | (torch.arange(lengths.shape[0], device=lengths.device) >= x.count)
    message = f"position {position} of every row: a row of the ragged tensor is too short"
    if is_compiling_here() or type(reached) is not Tensor or reached.is_cuda:
        torch.ops.aten._assert_async.msg(reached.all(), message)
    elif not reached.all():
        short = (~reached).nonzero().squeeze(1).tolist()
        raise IndexError(f"index {position} is out of bounds for rows {short} of {shown(x)}")
    index = x.offsets[:-1] + (position if position >= 0 else lengths + position)
    if x.count is not None:  # for spare rows any entry that exists
        index = torch.where(torch.arange(lengths.shape[0], device=lengths.device) < x.count, index, 0)
    entries = x.unwrap("values").index_select(x.ragged_dim - 1, index).movedim(x.ragged_dim - 1, 0)
    return x.per_row(entries, 0)


def take_places(x: JaggedTensor, positions: Any) -> Tensor:
    """Returns the entries at some positions of every row, dense; the ragged dimension has one for each."""
    check_all_exist(x, "indexing positions")
    positions = common_positions(x, positions)
    rows = torch.arange(x.offsets.shape[0] - 1, device=positions.device)
    index = _entries_of(x, rows.unsqueeze(1), positions)
    values, values_dim = x.unwrap("values"), x.ragged_dim - 1
    return (
        values.index_select(values_dim, index.flatten())
        .unflatten(values_dim, index.shape)
        .movedim(values_dim, 0)
    )


def take_pairs(x: JaggedTensor, rows: Any, positions: Any, index: tuple[Any, ...]) -> Tensor:
    """Returns single entries by row numbers and positions, dense."""
    check_all_exist(x, "indexing rows and positions")
    rest = index[1:]
    if x.ragged_dim != 1 and not all(is_index(i) for i in rest):
        raise DispatchError(
            f"indexing {shown(x)}: index tensors for rows and places follow each other, or are there for all "
            "dimensions",
            code="argument-refused",
        )
    pair = [torch.as_tensor(i, device=x.offsets.device) for i in (rows, positions)]
    check_numbers(x, *pair)
    values_dim = x.ragged_dim - 1
    return x.unwrap("values")[(*rest[:values_dim], _entries_of(x, *pair), *rest[values_dim + 1 :])]


def _entries_of(x: JaggedTensor, rows: Tensor, positions: Tensor) -> Tensor:
    """Returns the indices of entries at positions of rows, which must exist; negative ones count from the end."""
    return x.offsets[:-1][rows] + existing_positions(x, rows, positions)


def gather_index(x: JaggedTensor, func: Any, index: JaggedTensor) -> Tensor:
    """Returns the indices in the values of entries at positions of each row; asserts that they exist."""
    if x.offsets.shape != index.offsets.shape:
        check_rows_match(func, x, index)  # raises with the numbers of rows
    rows = index.segments
    shape = [-1, *[1] * (index._raw_values.dim() - 1)]
    first, reach = (index.trailing(rows.spread_rows(t).view(shape)) for t in (x.offsets[:-1], x.counts))
    positions = index.kept(index._raw_values)
    reached = index.kept((positions >= 0) & (positions < reach), True)
    message = f"{func.__name__}: an index lies beyond its row of {shown(x)}"
    torch.ops.aten._assert_async.msg(reached.all(), message)
    return index.kept(positions + first)


def pick(x: JaggedTensor, func: Any, mask: JaggedTensor) -> JaggedTensor:
    """Returns the entries of each row that a ragged mask selects, ragged again."""
    if mask.dtype != torch.bool or mask.ragged_dim != x.ragged_dim:
        raise DispatchError(
            f"{doing(func)} {shown(x)}: expected a bool mask of the same rows, ragged along {x.ragged_dim}, got "
            f"{shown(mask)}, {mask.dtype}{_cure_of(x, mask)}",
            code="rows-apart",
        )
    if x.ragged_dim > 1:
        raise DispatchError(
            f"{doing(func)} {shown(x)} by a mask: rows are ragged along 1 there",
            code="row-dims",
            hint=f"write x.transpose(1, {x.ragged_dim}), and the same for the mask",
        )
    check_rows_match(func, x, mask)
    same_size = x if x.dim() == mask.dim() else x.with_values(mask._raw_values)
    mask = same_size.relaid(func, mask)
    picked = x.segments.keep(mask._raw_values, False)
    counts = x.segments.sum_rows(picked.flatten(1).sum(1) if picked.dim() > 1 else picked)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    values = x.unwrap("values").flatten(0, picked.dim() - 1).index_select(0, true_positions(picked.flatten()))
    longest = longest_of(counts, x.max_length * math.prod(picked.shape[1:]))
    return type(x)(values, offsets, count=x.count, ragged_dim=min(x.ragged_dim, 1), max_length=longest)


def _cure_of(x: JaggedTensor, mask: JaggedTensor) -> str:
    """Returns a hint for errors: how to give a mask the rows of ``x``."""
    if mask.ragged_dim == 0 and x.ragged_dim > 0:
        return "; unmerge it by mask.unflatten(0, (B, T))"
    return "; merge it by mask.flatten(0, 1)" if x.ragged_dim == 0 and mask.ragged_dim == 1 else ""


# ---- features --------------------------------------------------------------------------------------------------


def pick_together(x: JaggedTensor, index: tuple[Any, ...]) -> JaggedTensor:
    """Returns elements by several index tensors for the features."""
    values_dim = max(x.ragged_dim - 1, 0)
    rest = index[min(x.ragged_dim, 1) :]
    positions = [p for p, i in enumerate(rest) if is_index(i)]
    alone = all(is_index(i) or is_all(i) for i in index) and not is_index(rest[values_dim])
    if not alone or positions != list(range(positions[0], positions[-1] + 1)):
        raise DispatchError(
            f"indexing {shown(x)}: expected index tensors for features that follow each other, and whole dimensions "
            f"beside them, got {shown_index(index)}",
            code="argument-refused",
        )
    indices = torch.broadcast_tensors(*(torch.as_tensor(rest[p], device=x.device) for p in positions))
    values = x.unwrap("values")[(*rest[: positions[0]], *indices, *rest[positions[-1] + 1 :])]
    moved = indices[0].dim() - len(positions) if values_dim > positions[0] else 0
    return x.with_values(values, x.ragged_dim + moved)
