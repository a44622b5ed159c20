"""Selection from a ``PaddedTensor``: rows, parts of every row, and entries at positions of every row.

Selection computes lengths on the device, without a synchronisation. A part that a row does not have is empty, and an
entry that a row must have is asserted. The padding of results receives no cotangent, since ``x`` may have entries
there. Only a row as a plain tensor of its own size (``x[0]``, ``x.unbind()``, a loop) reads lengths on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from subclasses.errors import DispatchError
from subclasses.ragged.base import RaggedTensor, name_of, outer_dims, rows_stay, shown
from subclasses.ragged.data_sizes import size_of
from subclasses.ragged.indexing.index import (
    check_numbers,
    common_positions,
    doing,
    existing_positions,
    is_all,
    is_index,
    outer_positions,
    replaced,
    row_numbers,
    shown_index,
)
from subclasses.ragged.indexing.splitting import bound_in_rows
from subclasses.ragged.padded import checks
from subclasses.ragged.padded.operands import as_wide, check_rows_match

if TYPE_CHECKING:
    from subclasses.ragged.padded.tensor import PaddedTensor

aten = torch.ops.aten

# ---- along the ragged dimension: tables of positions ------------------------------------------------------------


def beside_table(x: PaddedTensor, positions: Tensor) -> Tensor:
    """Reshapes ``[B, n]`` to broadcast against a table with the dimensions of ``x``."""
    size = [1] * x.dim()
    size[x.batch_dim], size[x.ragged_dim] = positions.shape
    return (positions if x.batch_dim < x.ragged_dim else positions.mT).reshape(size)


def entries_at(x: PaddedTensor, positions: Tensor) -> Tensor:
    """Returns the table of the entries at ``positions [B, n]`` of each row; any value where a row has no entry."""
    size = [positions.shape[1] if d == x.ragged_dim else n for d, n in enumerate(x.shape)]
    if not x.width:
        return x.to_padded(at_least=1).unwrap("padded").expand(size)
    index = beside_table(x, positions.clamp(0, x.width - 1))
    return x.to_dense().gather(x.ragged_dim, index.expand(size))


def cut(x: PaddedTensor, first: Tensor, lengths: Tensor, width: Any, step: int = 1) -> PaddedTensor:
    """Returns ``lengths [B]`` entries of each row from ``first [B]`` on, in a table of this width."""
    steps = torch.arange(0, width * step, step, device=lengths.device)
    return other_rows(x, entries_at(x, first.unsqueeze(1) + steps), lengths)


def other_rows(x: PaddedTensor, table: Tensor, lengths: Tensor) -> PaddedTensor:
    """Returns rows of other lengths, whose padding receives no cotangent."""
    return x.with_lengths(table, lengths, x.row_count).with_kept(table)


# ---- slices, which are views -----------------------------------------------------------------------------------


def slice_view(x: PaddedTensor, dim: int, start: Any, stop: Any, step: Any) -> PaddedTensor:
    """Returns a slice along the batch or the ragged dimension, whose derivative has the rows of ``x`` again."""
    y = aten.slice.Tensor(x, dim, start, stop, step)
    # The derivative of a slice saves the size alone, so a hook adds the rows. A later write to the view replaces the
    # derivative. Its result is then dense, with zeros in the padding.
    if not torch.compiler.is_dynamo_compiling():
        x.took_view(y)
    return y


def took_view(self: PaddedTensor, view: Tensor) -> None:
    """Registers a hook that wraps the cotangent from a view of this tensor with the rows of this tensor."""
    node, end = view.grad_fn, get_gradient_edge(self).node if self.requires_grad else None
    while node is not None and end is not None:
        before = node.next_functions[0][0] if node.next_functions else None
        if before is end:
            node.register_hook(_with_rows_of(self))
            return
        node = before


def _with_rows_of(x: PaddedTensor) -> Any:
    with torch.no_grad():
        rows = x.with_padded(x._raw_padded.new_empty(()).expand(x._raw_padded.shape))  # no data is kept

    def wrap(grads: tuple[Any, ...], _: Any) -> tuple[Any, ...]:
        return tuple(g if g is None or isinstance(g, RaggedTensor) else rows.wrap_cotangent(g) for g in grads)

    return wrap


# ---- parts of every row ----------------------------------------------------------------------------------------


def slice_rows(x: PaddedTensor, part: slice) -> PaddedTensor:
    """Returns the same slice of every row; negative bounds count from the end of each row.

    The result is a view, unless the slice begins at another position of each row.
    """
    step = 1 if part.step is None else part.step
    if not isinstance(step, int) or step < 1:
        raise DispatchError(
            f"indexing {shown(x)}: rows are cut with a positive step, got {part}", code="argument-refused"
        )
    start = 0 if part.start is None else part.start
    if start >= 0:
        return slice_view(x, x.ragged_dim, start, part.stop, step)
    ends = 0 if part.stop is None else part.stop
    most = min(ends - start, x.width) if ends <= 0 else min(-start, ends, x.width)
    lengths = lengths_after(x, start, part.stop, step)
    return cut(x, bound_in_rows(start, x.counts), lengths, -(-max(most, 0) // step), step)


def lengths_after(x: PaddedTensor, start: Any, end: Any, step: int) -> Tensor:
    """Returns how many entries a slice of every row has."""
    counts = x.counts
    first = bound_in_rows(0 if start is None else start, counts)
    last = counts if end is None else bound_in_rows(end, counts)
    return ((last - first).clamp(min=0) + step - 1) // step


def count_after(func: Any, x: PaddedTensor, start: Any, end: Any, step: int) -> Tensor | None:
    """Returns how many rows of a slice are in the batch."""
    if x.row_count is None:
        return None
    if step != 1:
        raise DispatchError(
            f"{name_of(func)}: rows of a padded batch are taken with step 1, got step {step}",
            code="batch-padded",
            hint=checks.UNPAD_BATCH,
        )
    if not isinstance(x.lengths.shape[0], int):
        raise DispatchError(
            f"{name_of(func)}: rows of a padded batch are taken where their number is known, and this compiled "
            "function is to take any",
            code="batch-padded",
            hint="compile it with dynamic=False, or give it a batch that is not padded",
        )
    rows = range(x.lengths.shape[0])[slice(start, end)]
    return (x.row_count - rows.start).clamp(min=0, max=len(rows))


def slice_below(x: PaddedTensor, op: Any, dim: int, start: Any, end: Any, step: int) -> PaddedTensor | None:
    """Returns a slice of rows, or of the same positions of every row; None for a slice of features.

    Above autograd, `slice_rows` handles bounds that count from the end of each row.
    """
    (dim,) = outer_dims(op, x, dim)
    if rows_stay(x, [dim]):
        return None
    table = op(x._raw_padded, dim, start, end, step)
    if start in (None, 0) and step == 1 and _reaches_end(x.size(dim), end):
        return x.with_padded(table)
    if dim == x.batch_dim and not x.merged:
        return x.with_lengths(table, op(x.lengths, 0, start, end, step), count_after(op, x, start, end, step))
    if x.merged or (start is not None and start < 0):
        x.feature_dim(op, dim)  # which raises
    return x.with_lengths(table, lengths_after(x, start, end, step), x.row_count)


def _reaches_end(size: Any, end: Any) -> bool:
    return end is None or end is size or (isinstance(end, int) and end >= size)


# ---- one position, or some, of every row -----------------------------------------------------------------------


def select_position(x: PaddedTensor, position: Any) -> Tensor:
    """Returns the entry at one position of every row; a negative position counts from the end of each row.

    Raises:
        RuntimeError: a row is too short (on CUDA and in graphs by an asynchronous assertion).
    """
    checked = checked_positions(x, torch.full_like(x.lengths, position).unsqueeze(1))
    if position >= 0 and x.row_count is None:
        return x.unwrap("padded").select(x.ragged_dim, position)
    dense = entries_at(x, checked).select(x.ragged_dim, 0)
    return x.per_row(dense, x.batch_dim - (x.ragged_dim < x.batch_dim))


def take_places(x: PaddedTensor, positions: Any) -> Tensor:
    """Returns the entries at some positions of every row, dense; the ragged dimension has one for each."""
    checked = checked_positions(x, common_positions(x, positions).expand(x.lengths.shape[0], -1))
    return x.per_row(entries_at(x, checked), x.batch_dim)


def checked_positions(x: PaddedTensor, positions: Tensor) -> Tensor:
    """Returns positions counted from the front; asserts that every row of the batch has them."""
    lengths = x.counts.unsqueeze(1)
    reached = (positions < lengths) & (positions >= -lengths)
    if x.row_count is not None:
        rows = torch.arange(lengths.shape[0], device=lengths.device).unsqueeze(1)
        reached = reached | (rows >= x.row_count)
    message = f"a place of every row of {shown(x)}: a row is too short"
    torch.ops.aten._assert_async.msg(reached.all(), message)
    return torch.where(positions < 0, lengths + positions, positions)


# ---- rows ------------------------------------------------------------------------------------------------------


def select_row(x: PaddedTensor, row: Any) -> Tensor:
    """Returns one row, dense: a view of the table. Reads the lengths on the host."""
    rows, count = x.to_tensors(), x.lengths.shape[0]
    if not -count <= row < count:
        raise IndexError(f"index {row} is out of bounds for the {count} rows of {shown(x)}")
    if row % count >= len(rows):
        raise IndexError(f"index {row} is out of bounds for the {len(rows)} rows of the batch in {shown(x)}")
    return rows[row % count]


def take_rows(x: PaddedTensor, which: Any) -> PaddedTensor:
    """Returns some rows: a slice is a view, an index tensor or mask copies the rows."""
    if isinstance(which, slice):
        step = 1 if which.step is None else which.step
        return slice_view(x, x.batch_dim, which.start, which.stop, step)
    which = row_numbers(x, which)
    if x.row_count is not None:
        raise DispatchError(
            f"indexing {shown(x)}: rows of a padded batch are taken by slices",
            code="batch-padded",
            hint=checks.UNPAD_BATCH,
        )
    which = torch.where(which < 0, which + x.lengths.shape[0], which)
    table = x.unwrap("padded").index_select(x.batch_dim, which)
    return x.with_lengths(table, x.lengths.index_select(0, which), None)


def repeat_rows(x: PaddedTensor, repeats: Tensor) -> PaddedTensor:
    """Repeats each row ``repeats [B]`` times."""
    return take_rows(x, torch.repeat_interleave(repeats, output_size=size_of(repeats.sum())))


def rearranged(x: PaddedTensor, source: Callable[[Tensor, Tensor], Tensor]) -> PaddedTensor:
    """Reorders the entries of each row; ``source(position, length)`` returns the position to read an entry from."""
    positions = torch.arange(x.width, device=x.lengths.device).expand(x.lengths.shape[0], -1)
    return other_rows(x, entries_at(x, source(positions, x.counts.unsqueeze(1))), x.lengths)


# ---- single entries --------------------------------------------------------------------------------------------


def take_pairs(x: PaddedTensor, rows: Any, positions: Any, index: tuple[Any, ...]) -> Tensor:
    """Returns single entries by row numbers and positions, dense."""
    if not all(is_index(i) or is_all(i) for i in index):
        raise DispatchError(
            f"indexing {shown(x)}: index tensors stand beside whole dimensions, got {shown_index(index)}",
            code="argument-refused",
            hint="index in two steps, as in x[rows, places][..., 1]",
        )
    at = outer_positions(index)
    rows, positions = settled_pairs(x, rows, positions)
    index = replaced(replaced(index, at[x.batch_dim], rows), at[x.ragged_dim], positions)
    return x.unwrap("padded")[index]


def settled_pairs(x: PaddedTensor, rows: Any, entries: Any) -> tuple[Tensor, Tensor]:
    """Returns row numbers and positions counted from the front; asserts that they exist."""
    rows, entries = (torch.as_tensor(i, device=x.lengths.device) for i in (rows, entries))
    check_numbers(x, rows, entries)
    rows, entries = torch.broadcast_tensors(rows, existing_positions(x, rows, entries))
    return torch.where(rows < 0, rows + x.lengths.shape[0], rows), entries


def gather_index(x: PaddedTensor, func: Any, index: PaddedTensor) -> Tensor:
    """Returns positions in the rows of ``x`` as an index of the table; asserts that they exist."""
    size = [n if d == x.batch_dim else 1 for d, n in enumerate(x.shape)]
    reached = (index._raw_padded < x.counts.view(size)) & (index._raw_padded >= 0)
    message = f"{name_of(func)}: an index lies beyond its row of {shown(x)}"
    torch.ops.aten._assert_async.msg((reached | ~index.exists).all(), message)
    return index.to_dense()


# ---- by a mask -------------------------------------------------------------------------------------------------


def pick(x: PaddedTensor, func: Any, mask: PaddedTensor) -> PaddedTensor:
    """Returns the entries of each row that a mask selects, in order; a mask of single elements returns rows ``[n]``."""
    if x.merged and mask.merged:
        return pick(x.unmerged(), func, mask.unmerged()).merge()
    x, mask = _batch_first(func, x), _batch_first(func, mask)
    check_mask(func, x, mask)
    mask = as_wide(x, mask)
    if mask.dim() > 2:
        x, mask = _elements(x), _elements(mask)
    picked = mask.to_dense(False)
    order = torch.sort((~picked).to(torch.uint8), dim=1, stable=True).indices
    table = x.to_dense().gather(1, beside_table(x, order).expand(x.shape)) if x.width else x.unwrap("padded")
    return other_rows(x, table, picked.sum(1))


def check_mask(func: Any, x: PaddedTensor, mask: PaddedTensor) -> None:
    """Raises unless a mask has one element for each entry, or one for each element of an entry."""
    if (
        mask.dtype != torch.bool
        or mask.dim() not in (2, x.dim())
        or (mask.dim() > 2 and mask.shape[2:] != x.shape[2:])
    ):
        raise DispatchError(
            f"{doing(func)} {shown(x)}: expected a bool mask of its rows, with the dimensions of an entry or none, got "
            f"{shown(mask)}, {mask.dtype}",
            code="argument-refused",
        )
    check_rows_match(func, x, mask)


def _batch_first(func: Any, x: PaddedTensor) -> PaddedTensor:
    """Returns ``x``; raises unless its rows are ``[B, T, ...]``."""
    if (x.batch_dim, x.ragged_dim) != (0, 1):
        raise DispatchError(
            f"{doing(func)} {shown(x)} by a mask: expected rows along 0, ragged along 1, of both",
            code="row-dims",
            hint="use transpose",
        )
    return x


def _elements(x: PaddedTensor) -> PaddedTensor:
    """Returns every element as an entry of its own."""
    features = x._raw_padded[:1, :1].numel() if x._raw_padded.numel() else 0
    return x.with_lengths(x.unwrap("padded").flatten(1), x.counts * features, x.row_count)
