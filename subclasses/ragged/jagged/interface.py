"""How a ``JaggedTensor`` implements `RaggedTensor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses._torch_tracing import is_compiling_here
from subclasses.errors import DispatchError
from subclasses.ragged.base import RaggedTensor, name_of, outer_dims, shown
from subclasses.ragged.checks import check_all_exist
from subclasses.ragged.jagged import joining, operands, selection, sharing, writing


class JaggedInterface(RaggedTensor):
    """The part of ``JaggedTensor`` that rules of both layouts call; see base.py for the meaning of each name."""

    kind = "jagged"
    rows_first = True
    contraction_hint = "select the entries first"
    index_hint = "index by index.unwrap('values'), or to_dense()"

    @property
    def batch_dim(self: Any) -> int:
        """The outer dimension that numbers the rows; the ragged dimension if both are merged."""
        return 0

    @property
    def stored(self: Any) -> Tensor:
        """The values, raw."""
        return self._raw_values

    @property
    def rank(self: Any) -> int:
        """The number of outer dimensions: one more than the values have, unless the dimensions of rows are merged."""
        return self._raw_values.dim() + (self.ragged_dim > 0)

    @property
    def has_gaps(self: Any) -> bool:
        """Whether there may be holes."""
        return self.lengths is not None or self.count is not None

    @property
    def width(self: Any) -> int:
        """``T``, the outer extent of the ragged dimension."""
        return self.max_length

    @property
    def counts(self: Any) -> Tensor:
        """``[B]``: how many entries of each row exist; 0 in a spare row."""
        return self.segments.row_lengths

    @property
    def row_count(self: Any) -> Tensor | None:
        """``[1]``: how many rows exist; None: all."""
        return None if self.count is None else self.count.view(1)

    def leader(self: Any, values: Sequence[Any]) -> Any:
        """Returns the first operand with rows; a merged one may have an entry for each row, as `per_row` returns."""
        if self.lengths is None or self.ragged_dim:
            return self
        return next((v for v in values if isinstance(v, self.ragged_class) and v.ragged_dim), self)

    def per_row(self: Any, dense: Tensor, dim: int) -> Tensor:
        """Returns a result with one entry for each row; ragged along dimension 0 if there is a count."""
        if self.count is None or self.merged:
            return dense
        rows = dense.shape[0]
        ends = torch.arange(2, device=dense.device) * rows
        return type(self)(dense, ends, lengths=self.row_count, ragged_dim=0, max_length=rows)

    def unwrap_stored(self: Any) -> Tensor:
        """The values as a differentiable function of this tensor."""
        return self.unwrap("values")

    def clean(self: Any, fill: float | int | bool = 0) -> Tensor:
        """The values as a differentiable function of this tensor, with ``fill`` in holes."""
        differentiable = self._raw_values.is_floating_point() or self._raw_values.is_complex()
        return self.kept(self.unwrap("values") if differentiable else self._raw_values, fill)

    def with_stored(self: Any, stored: Tensor, *rows: int) -> Any:
        """Returns other values for the same rows; the batch dimension stays first."""
        return self.with_values(stored, rows[0] if rows else None)

    def with_kept(self: Any, stored: Tensor, *rows: int) -> Any:
        """Returns other values for the same rows, with 0 in holes."""
        ragged_dim = rows[0] if rows else self.ragged_dim
        if self.has_gaps:
            values_dim = max(ragged_dim - 1, 0)
            stored = self.segments.keep(stored.movedim(values_dim, 0)).movedim(0, values_dim)
        return self.with_values(stored, ragged_dim)

    def stored_dim(self: Any, dim: int) -> int:
        """Returns the dimension of the values for an outer dimension; -1 for the batch dimension."""
        return dim if self.ragged_dim == 0 else dim - 1

    def from_table(self: Any, table: Tensor, *rows: int) -> Any:
        """Returns the entries of a plain tensor that has the rows of this one; differentiable in it."""
        ragged_dim = rows[0] if rows else self.ragged_dim
        if ragged_dim == 0:
            return self.with_values(self.segments.keep(table), 0)
        return self.with_entries(self.segments.unpad(table.movedim(ragged_dim, 1)), ragged_dim)

    def of_lengths(self: Any, table: Tensor, lengths: Tensor) -> Any:
        """Returns the first ``lengths [B]`` entries of each row of a table."""
        check_all_exist(self, "rows of other lengths")
        rows = type(self).from_padded(table.movedim(self.ragged_dim, 1), lengths)
        return rows if self.ragged_dim == 1 else rows.with_entries(rows.unwrap("values"), self.ragged_dim)

    def to_table(self: Any, width: int) -> Tensor:
        """Returns the padded tensor with ``width`` positions for each row, 0 where there is no entry."""
        missing = width - self.max_length
        return F.pad(self.to_dense(), [0, 0] * (self.dim() - 1 - self.ragged_dim) + [0, missing])

    def batch_size(self: Any) -> Any:
        """The number of rows, or of the entries of merged dimensions."""
        if not self.ragged_dim:
            return self.segments.number()
        return self.offsets.shape[0] - 1 if self.count is None else self.count

    def samples(self: Any, fill: float) -> Tensor:
        """Returns the entries, ragged dimension first, with ``fill`` in holes."""
        return self.leading(self.kept(self.unwrap("values"), fill))

    def from_samples(self: Any, table: Tensor, *rows: int) -> Any:
        """Returns the losses of the entries as a ragged tensor."""
        return self.with_entries(table, rows[0])

    # ---- reductions --------------------------------------------------------------------------------------------

    def sum_rows(self: Any, stored: Tensor, dims: Sequence[int], keepdim: bool, dtype: Any) -> Tensor:
        """Sums the existing entries of a tensor with the shape of the values, along batch or ragged dimension."""
        rest = [d for d in range(self.dim()) if d not in self.row_dims]
        entries, rows = self.leading(stored), self.segments
        features = [1 + n for n, d in enumerate(rest) if d in dims]
        if features:
            entries = entries.sum(features, keepdim, dtype=dtype)
        elif dtype is not None:
            entries = entries.to(dtype)
        if 0 in dims and self.ragged_dim in dims:
            result = rows.keep(entries).sum(0)
        elif self.ragged_dim in dims:
            result = rows.sum_rows(entries)
        else:
            dim = sum(d < self.ragged_dim and (keepdim or d not in dims) for d in rest)
            result = rows.sum_positions(entries)
            result = result.movedim(0, dim) if dim else result
        for d in sorted(set(self.row_dims).intersection(dims if keepdim else ())):
            result = result.unsqueeze(d)
        return result

    def count_entries(self: Any, dims: Sequence[int], keepdim: bool) -> Any:
        """Returns how many entries each result of `sum_rows` has: an int, or a tensor that broadcasts."""
        rows = self.segments
        if 0 in dims and self.ragged_dim in dims:
            return rows.number()
        numbers = rows.row_lengths if self.ragged_dim in dims else rows.mask().sum(0)
        # All dimensions but the dimension of the counts have extent 1.
        stays = 0 if self.ragged_dim in dims else self.ragged_dim
        gone = () if keepdim else dims
        return numbers.view(
            [numbers.shape[0] if d == stays else 1 for d in range(self.dim()) if d not in gone]
        )

    def check_has_entries(self: Any, func: Any, dims: Sequence[int]) -> None:
        """Raises if a row or a position has no entry to reduce."""
        by_row = self.ragged_dim in dims
        if by_row and 0 in dims:
            return
        counts = self.counts if by_row else self.segments.mask().sum(0)
        if by_row and self.count is not None:
            counts = torch.where(torch.arange(counts.shape[0], device=counts.device) < self.count, counts, 1)
        if is_compiling_here() or type(counts) is not Tensor or counts.is_cuda:
            torch.ops.aten._assert_async.msg(
                (counts > 0).all(), f"{name_of(func)}: a row of a ragged tensor is empty"
            )
        elif not bool((counts > 0).all()):
            where = (counts == 0).nonzero().squeeze(1).tolist()
            raise IndexError(
                f"{name_of(func)}: {shown(self)} has no entries in {'rows' if by_row else 'positions'} {where}"
            )

    # ---- dimensions --------------------------------------------------------------------------------------------

    def feature_dim(self: Any, func: Any, dim: int) -> int:
        """Returns a dimension of the entries, counted from the front; raises for a dimension of the rows."""
        (outer,) = outer_dims(func, self, dim)
        if outer == self.ragged_dim:
            raise DispatchError(
                f"{name_of(func)}: dimension {dim} of {shown(self)} is the ragged one",
                code="row-dims",
                hint="x.to_dense() gives a tensor without this limit",
            )
        if outer == 0:
            self.check_first(func)
        return outer

    def check_first(self: Any, func: Any) -> None:
        """Raises, since no other dimension comes before the rows."""
        if self.merged:
            raise DispatchError(
                f"{name_of(func)}: the merged dimensions of {shown(self)} stay first",
                code="row-dims",
                hint="x.to_dense() or x.unwrap('values') gives a tensor without this limit",
            )
        raise DispatchError(
            f"{name_of(func)}: the batch dimension of {shown(self)} comes first and stays as it is",
            code="row-dims",
            hint="x.to_dense() gives a tensor without this limit",
        )

    # ---- operands, selection, joining -------------------------------------------------------------------------

    beside = operands.beside
    aligned = operands.aligned
    operand = operands.operand
    alongside = operands.alongside
    relaid = operands.relaid
    moved = operands.moved
    check_factors = operands.check_factors
    write = sharing.write_values
    check_writable = sharing.check_writable
    to_tensors = selection.to_tensors
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
    pick = selection.pick
    pick_together = selection.pick_together
    as_rows = joining.as_rows
    join_rows = joining.join_rows
    join_entries = joining.join_entries

    def check_same_rows(self: Any, func: Any, a: Any, b: Any) -> None:
        """Raises unless two factors of a product have the same rows."""
        operands.check_rows_match(func, a, b)

    with_written = writing.with_written
    with_put = writing.with_put
