"""How a ``PaddedTensor`` implements `RaggedTensor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.base import RaggedTensor, is_ragged, name_of, outer_dims, rows_stay, shown
from subclasses.ragged.padded import joining, operands, selection, writing
from subclasses.ragged.padded.buckets import exists_in
from subclasses.ragged.rules.reducing import per_row


class PaddedInterface(RaggedTensor):
    """The part of ``PaddedTensor`` that rules of both layouts call; see base.py for the meaning of each name."""

    kind = "padded"
    rows_first = False
    has_gaps = True
    index_hint = "use to_dense()"
    contraction_hint = "make both PaddedTensors with the same lengths"

    @property
    def stored(self: Any) -> Tensor:
        """The table, raw."""
        return self._raw_padded

    def unwrap_stored(self: Any) -> Tensor:
        """The table as a differentiable function of this tensor."""
        return self.unwrap("padded")

    def stored_dim(self: Any, dim: int) -> int:
        """Returns the dimension of the table for an outer dimension: the same."""
        return dim

    def to_table(self: Any, width: int) -> Tensor:
        """Returns the table; the other factor has a table of the same width."""
        return self.to_dense()

    def with_kept(self: Any, stored: Tensor, *rows: int) -> Any:
        """Returns another table with the same rows and 0 in the padding, which receives no cotangent."""
        ragged_dim, batch_dim = rows or (self.ragged_dim, self.batch_dim)
        exists = exists_in(stored, self.lengths, ragged_dim, batch_dim)
        return self.with_padded(torch.where(exists, stored, stored.new_full((), 0)), ragged_dim, batch_dim)

    from_table = from_samples = with_kept
    of_lengths = selection.other_rows

    def batch_size(self: Any) -> Any:
        """Returns the number of rows of the batch, or of the entries of merged dimensions."""
        if self.merged:
            return self.exists.sum()
        return self.shape[self.batch_dim] if self.row_count is None else self.row_count.squeeze(0)

    def check_writable(self: Any, func: Any, *operands: Any) -> None:
        """Does nothing: autograd records every write to a table."""

    # ---- reductions --------------------------------------------------------------------------------------------

    def sum_rows(self: Any, stored: Tensor, dims: tuple[int, ...], keepdim: bool, dtype: Any) -> Tensor:
        """Sums the existing entries of a tensor with the shape of the table, along batch or ragged dimension."""
        return self.kept(stored).sum(dims, keepdim, dtype=dtype)

    def count_entries(self: Any, dims: tuple[int, ...], keepdim: bool) -> Tensor:
        """Returns how many entries each result of `sum_rows` has; broadcasts."""
        return self.exists.sum(dims, keepdim)

    def check_has_entries(self: Any, func: Any, dims: tuple[int, ...]) -> None:
        """Asserts that each row or position has an entry to reduce; asynchronous on a GPU."""
        has_entries = per_row(self, dims, False, self.exists.sum(dims) > 0)
        if is_ragged(has_entries):  # rows beyond the batch need none
            has_entries = has_entries.to_dense(fill=True)
        message = f"{name_of(func)}: a row or position of {shown(self)} has no entries"
        torch.ops.aten._assert_async.msg(has_entries.all(), message)

    def check_numbered(self: Any, func: Any, dims: Sequence[int]) -> None:
        """Raises if a result would number entries of several merged rows, which have padding between them."""
        if self.merged and self.ragged_dim in dims and self.lengths.shape[0] != 1:
            raise DispatchError(
                f"{name_of(func)}: an order of merged rows has no place in {shown(self)}",
                code="row-dims",
                hint=f"unmerge them by x.unflatten({self.ragged_dim}, (B, T)), or use x.to_jagged()",
            )

    # ---- dimensions --------------------------------------------------------------------------------------------

    def feature_dim(self: Any, func: Any, dim: int) -> int:
        """Returns a dimension of the entries, counted from the front; raises for a dimension of the rows."""
        (dim,) = outer_dims(func, self, dim)
        if not rows_stay(self, [dim]):
            raise DispatchError(
                f"{name_of(func)}: {shown(self)} stays whole along its rows, got dimension {dim}",
                code="row-dims",
                hint="x.to_dense(), x.to_tensors() and x.to_jagged() give tensors without this limit",
            )
        return dim

    # ---- operands, selection, joining -------------------------------------------------------------------------

    slice_below: Any = selection.slice_below
    leader: Any = operands.leader
    beside = operands.beside
    aligned = operands.aligned
    operand = operands.operand
    alongside = operands.alongside
    relaid = operands.relaid
    moved = operands.moved
    write = operands.write
    check_factors = operands.check_factors
    check_same_rows = operands.check_same_rows
    select_row = selection.select_row
    take_rows = selection.take_rows
    repeat_rows = selection.repeat_rows
    slice_rows = selection.slice_rows
    cut = selection.cut
    rearranged = selection.rearranged
    select_position = selection.select_position
    take_places = selection.take_places
    take_pairs = selection.take_pairs
    gather_index = selection.gather_index
    took_view = selection.took_view
    pick = selection.pick
    as_rows = joining.as_rows
    join_rows = joining.join_rows
    join_entries = joining.join_entries
    with_written = writing.with_written
    with_put = writing.with_put
