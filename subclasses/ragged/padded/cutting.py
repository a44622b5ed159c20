"""Cutting rows: some of them, a part of each, one place of each; what a loop over the rows would give.

Only lengths are computed, on the device, and nothing waits for them: a part that a row has not is empty, and one that
it must have is asserted. What these make is cut off from the cotangents of its own padding, which may be entries here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from subclasses.errors import DispatchError
from subclasses.ragged.padded import checks
from subclasses.ragged.padded.rows import shown
from subclasses.ragged.padded.tensor import PaddedTensor
from subclasses.ragged.splitting import implement_tensor_split

aten = torch.ops.aten

# ---- along the ragged dimension: tables of places ---------------------------------------------------------------


def beside_table(x: PaddedTensor, places: Tensor) -> Tensor:
    """``[B, n]`` ready to broadcast against a table with the dimensions of ``x``."""
    size = [1] * x.dim()
    size[x.batch_dim], size[x.ragged_dim] = places.shape
    return (places if x.batch_dim < x.ragged_dim else places.mT).reshape(size)


def take_places(x: PaddedTensor, places: Tensor) -> Tensor:
    """The table of the entries at ``places [B, n]`` of each row; one that a row has not gives anything."""
    width = x.width
    if not width:
        return x.to_padded(at_least=1).unwrap("padded").expand(
            [places.shape[1] if d == x.ragged_dim else n for d, n in enumerate(x.shape)]
        )  # fmt: skip
    index = beside_table(x, places.clamp(0, width - 1))
    size = [places.shape[1] if d == x.ragged_dim else n for d, n in enumerate(x.shape)]
    return x.to_dense().gather(x.ragged_dim, index.expand(size))


def cut(x: PaddedTensor, first: Tensor, lengths: Tensor, width: Any, step: int = 1) -> PaddedTensor:
    """The entries of each row from ``first [B]`` on, ``lengths [B]`` of them, in a table of this width."""
    steps = torch.arange(0, width * step, step, device=lengths.device)
    return other_rows(x, take_places(x, first.unsqueeze(1) + steps), lengths)


def other_rows(x: PaddedTensor, table: Tensor, lengths: Tensor) -> PaddedTensor:
    """Rows of other lengths, where no cotangent comes back from their padding."""
    y = x.with_lengths(table, lengths, x.row_count)
    return y.with_padded(y.kept(table))


# ---- slices, which are views -----------------------------------------------------------------------------------


def slice_view(x: PaddedTensor, dim: int, start: Any, stop: Any, step: Any) -> PaddedTensor:
    """A slice along the batch or the ragged dimension, whose derivative has the rows of ``x`` again."""
    y = aten.slice.Tensor(x, dim, start, stop, step)
    # The derivative of a slice knows its size alone. (A later write to the view gives it another one, and then what
    # comes back is dense, with zeros in the padding.)
    if not torch.compiler.is_dynamo_compiling():
        x.took_view(y)
    return y


def took_view(self: PaddedTensor, view: Tensor) -> None:
    """Gives the first derivative on the way back from a view the rows of what it is a view of."""
    node, end = view.grad_fn, get_gradient_edge(self).node if self.requires_grad else None
    while node is not None and end is not None:
        before = node.next_functions[0][0] if node.next_functions else None
        if before is end:
            node.register_hook(_with_rows_of(self))
            return
        node = before


def _with_rows_of(x: PaddedTensor) -> Any:
    with torch.no_grad():
        rows = x.with_padded(x.padded.new_empty(()).expand(x.padded.shape))  # no data is kept

    def wrap(grads: tuple[Any, ...], _: Any) -> tuple[Any, ...]:
        return tuple(g if g is None or isinstance(g, PaddedTensor) else rows.wrap_cotangent(g) for g in grads)

    return wrap


PaddedTensor.took_view = took_view  # stands here, beside the slices that need it


# ---- parts of every row ----------------------------------------------------------------------------------------


def slice_rows(x: PaddedTensor, part: slice) -> PaddedTensor:
    """The same slice of every row; negative bounds count from each row's own end.

    A view, except where it begins at another place of each row.
    """
    step = 1 if part.step is None else part.step
    if not isinstance(step, int) or step < 1:
        raise DispatchError(f"indexing {shown(x)}: rows are cut with a positive step, got {part}")
    start = 0 if part.start is None else part.start
    if start >= 0:
        return slice_view(x, x.ragged_dim, start, part.stop, step)
    ends = 0 if part.stop is None else part.stop
    most = min(ends - start, x.width) if ends <= 0 else min(-start, ends, x.width)
    lengths = lengths_after(x, start, part.stop, step)
    return cut(x, _bound(start, x.counts), lengths, -(-max(most, 0) // step), step)


def lengths_after(x: PaddedTensor, start: Any, end: Any, step: int) -> Tensor:
    """How many entries a slice of every row has."""
    counts = x.counts
    first = _bound(0 if start is None else start, counts)
    last = counts if end is None else _bound(end, counts)
    return ((last - first).clamp(min=0) + step - 1) // step


def count_after(func: Any, x: PaddedTensor, start: Any, end: Any, step: int) -> Tensor | None:
    """How many of the rows in a slice are of the batch."""
    if x.row_count is None:
        return None
    if step != 1 or not isinstance(x.lengths.shape[0], int):
        raise DispatchError(f"{func}: every row of a padded batch in turn, got {step}; {checks.UNPAD_BATCH}")
    rows = range(x.lengths.shape[0])[slice(start, end)]
    return (x.row_count - rows.start).clamp(min=0, max=len(rows))


def _bound(bound: Any, lengths: Tensor) -> Tensor:
    """Where a slice's bound lies in each row."""
    return (lengths + bound if bound < 0 else torch.full_like(lengths, bound)).clamp(min=0).minimum(lengths)


implement_tensor_split(PaddedTensor, cut, lambda x: (x.batch_dim, x.ragged_dim, x.counts), shown)


# ---- one place, or some, of every row --------------------------------------------------------------------------


def select_position(x: PaddedTensor, position: Any) -> Tensor:
    """The entry at one place of every row; a negative place counts from each row's end.

    Raises:
        RuntimeError: a row is too short (on CUDA, and in graphs, by an assertion that nothing waits for).
    """
    found = checked_places(x, torch.full_like(x.lengths, position).unsqueeze(1))
    if position >= 0 and x.row_count is None:
        return x.unwrap("padded").select(x.ragged_dim, position)
    dense = take_places(x, found).select(x.ragged_dim, 0)
    return x.per_row(dense, x.batch_dim - (x.ragged_dim < x.batch_dim))


def take_positions(x: PaddedTensor, places: Tensor) -> Tensor:
    """The entries at ``places [B, n]`` of each row, of which every row has as many."""
    return x.per_row(take_places(x, checked_places(x, places)), x.batch_dim)


def checked_places(x: PaddedTensor, places: Tensor) -> Tensor:
    """Places counted from the front, which every row of the batch must have."""
    lengths = x.counts.unsqueeze(1)
    reached = (places < lengths) & (places >= -lengths)
    if x.row_count is not None:
        rows = torch.arange(lengths.shape[0], device=lengths.device).unsqueeze(1)
        reached = reached | (rows >= x.row_count)
    message = f"a place of every row of {shown(x)}: a row is too short"
    torch.ops.aten._assert_async.msg(reached.all(), message)
    return torch.where(places < 0, lengths + places, places)


# ---- rows ------------------------------------------------------------------------------------------------------


def select_row(x: PaddedTensor, row: Any) -> Tensor:
    """One row, dense: a view of the table. Reads the lengths."""
    rows, count = x.to_tensors(), x.lengths.shape[0]
    if not -count <= row < count:
        raise IndexError(f"index {row} is out of bounds for the {count} rows of {shown(x)}")
    if row % count >= len(rows):
        raise IndexError(f"index {row} is out of bounds for the {len(rows)} rows of the batch in {shown(x)}")
    return rows[row % count]


def take_rows(x: PaddedTensor, which: Any) -> PaddedTensor:
    """Some rows: a slice is a view, an index tensor or mask copies the rows."""
    if isinstance(which, slice):
        step = 1 if which.step is None else which.step
        return slice_view(x, x.batch_dim, which.start, which.stop, step)
    which = torch.as_tensor(which, device=x.lengths.device)
    if which.dim() != 1 or which.is_floating_point():
        raise DispatchError(f"indexing {shown(x)}: expected rows as an int, a slice, a list or a tensor [n]")
    if x.row_count is not None:
        raise DispatchError(
            f"indexing {shown(x)}: rows of a padded batch are taken by slices; {checks.UNPAD_BATCH}"
        )
    if which.dtype == torch.bool:
        which = which.nonzero().squeeze(1)
    which = torch.where(which < 0, which + x.lengths.shape[0], which)
    table = x.unwrap("padded").index_select(x.batch_dim, which)
    return x.with_lengths(table, x.lengths.index_select(0, which))
