"""``PaddedTensor``: rows of uneven length in a dense table, with their lengths on the device.

The semantics are the same as for ``JaggedTensor``: an entry past a row's length does not exist. No result and no
gradient depends on the value of the table there, NaN included. Ops that mix entries replace it by a fill that changes
no result (``to_dense``). Cotangents of padding become 0 where rows enter and leave (``kept``). Pointwise ops may
compute any value in the padding.

No length is ever read on the host, so one compiled program serves all lengths of a bucket.

If ``ragged_dim`` equals ``batch_dim``, the batch and the ragged dimension are merged: rows follow each other, each with
its padding. A merged tensor of one row is ragged along that dimension. A reduction over the ragged dimension returns
such a tensor if there is a row count.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses import TensorSubclass, inner, static
from subclasses.ragged.checks import check_has_rows, check_mask, check_rows
from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.padded import checks
from subclasses.ragged.padded.buckets import Buckets, bucket_of, exists_in, widen
from subclasses.ragged.padded.interface import PaddedInterface
from subclasses.ragged.printing import emit_rows

# ---- the declaration -------------------------------------------------------------------------------------------


class PaddedTensor(PaddedInterface, TensorSubclass):
    """Rows of uneven length in a dense table ``[B, T, ...]``.

    Args:
        padded: the table; entries past a row's length may have any values.
        lengths: ``[B]`` int64 on the device of the table, how many entries of each row exist. The constructor does not
            read them; a length beyond ``T`` counts as ``T``.
        ragged_dim: the dimension of ``padded`` along which rows differ.
        batch_dim: the dimension of ``padded`` that numbers the rows.
        row_count: ``[1]`` int64, the number of rows in the batch, if the table has more. The additional rows have
            length 0, and a reduction over the ragged dimension has no result for them. None: all rows of the table.

    Raises:
        ValueError: shapes, dimensions or devices do not match.
    """

    _instead = "use x.to_dense(fill) with x.mask(), x.to_tensors() or x.to_jagged()"

    padded: Tensor = inner(differentiable=True)
    lengths: Tensor = inner(dtype=torch.int64)
    row_count: Tensor | None = inner(dtype=torch.int64, optional=True)
    ragged_dim: int = static(default=1)
    batch_dim: int = static(default=0)

    def __new__(
        cls,
        padded: Tensor,
        lengths: Tensor,
        *,
        ragged_dim: int = 1,
        batch_dim: int = 0,
        row_count: Tensor | None = None,
    ) -> Any:
        """Checks that the arguments match; see the class."""
        ragged_dim, batch_dim = checks.check_parts(padded, lengths, ragged_dim, batch_dim, row_count)
        if isinstance(padded, Tensor) and padded.requires_grad and torch.is_grad_enabled():
            padded = torch.where(exists_in(padded, lengths, ragged_dim, batch_dim), padded, 0)
        return super().__new__(cls, padded, lengths, row_count, ragged_dim=ragged_dim, batch_dim=batch_dim)

    if TYPE_CHECKING:  # for type checkers: the stored table, and a signature that the fields do not determine
        _raw_padded: Tensor

        def __init__(
            self,
            padded: Tensor,
            lengths: Tensor,
            *,
            ragged_dim: int = 1,
            batch_dim: int = 0,
            row_count: Tensor | None = None,
        ) -> None: ...

    # ---- constructors ------------------------------------------------------------------------------------------

    @classmethod
    def of_dense(cls, dense: Tensor) -> PaddedTensor:
        """Makes rows of equal length from ``dense [B, T, ...]``; for rules."""
        batch, length = dense.shape[:2]
        return cls(dense, torch.full((batch,), length, device=dense.device))

    @classmethod
    def from_tensors(
        cls,
        rows: Sequence[Tensor],
        *,
        multiple: int | None = None,
        buckets: Buckets | None = None,
        batch_multiple: int | None = None,
    ) -> PaddedTensor:
        """Makes one row per tensor ``[length, ...]``, padded up to a bucket; differentiable in the tensors.

        Args:
            rows: tensors that differ in their first extent alone.
            multiple: the table is as wide as the next multiple of this.
            buckets: the table is as wide as the least of these that fits the longest row; "powers": of two.
            batch_multiple: the table has as many rows as the next multiple of this. Rows past the given ones have
                length 0, and no result has an entry for them.

        Raises:
            ValueError: there is no row, rows differ in more than their length, or no bucket is wide enough.
        """
        check_rows(rows, "PaddedTensor")
        lengths = [row.shape[0] for row in rows]
        width = bucket_of(max(lengths), multiple, buckets)
        count = bucket_of(len(rows), batch_multiple)
        padded = torch.stack(
            [F.pad(row, [0, 0] * (row.dim() - 1) + [0, width - row.shape[0]]) for row in rows]
        )
        padded = widen(padded, 0, count)
        sizes = torch.tensor(lengths + [0] * (count - len(rows)), device=padded.device)
        given = None if batch_multiple is None else torch.tensor([len(rows)], device=padded.device)
        return cls(padded, sizes, row_count=given)

    @classmethod
    def by_length(cls, rows: Sequence[Tensor], buckets: Buckets) -> list[tuple[Tensor, PaddedTensor]]:
        """Sorts rows into tables by their length, with less padding than one table; differentiable in them.

        The sum of the gradients of all tables is the gradient of one table of all rows. ``propose_buckets`` returns
        widths that suit the lengths of a data set; a compiled function has a program for each width.

        Args:
            rows: tensors that differ in their first extent alone.
            buckets: the widths that tables may have, in ascending order; "powers": powers of two.

        Returns:
            For each table in use, the numbers of its rows ``[n]`` and the table. ``torch.cat`` of the numbers sorted
            (``argsort``) leads back to the order of ``rows``.

        Raises:
            ValueError: there is no row, rows differ in more than their length, or no bucket is wide enough.
        """
        check_rows(rows, "PaddedTensor")
        groups: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            groups.setdefault(bucket_of(row.shape[0], buckets=buckets), []).append(number)
        return [
            (torch.tensor(numbers), cls.from_tensors([rows[n] for n in numbers], buckets=[width]))
            for width, numbers in sorted(groups.items())
        ]

    @classmethod
    def from_mask(cls, padded: Tensor, mask: Tensor) -> PaddedTensor:
        """Makes rows of the entries of ``padded [B, T, ...]`` where ``mask [B, T]`` is True; differentiable.

        Raises:
            ValueError: ``mask`` is not a bool tensor of that shape.
            RuntimeError: the True elements of a row do not come first (on CUDA and in graphs by an asynchronous
                assertion); ``JaggedTensor.from_mask`` takes entries from anywhere.
        """
        check_mask(padded, mask, "PaddedTensor")
        x = cls(padded, mask.sum(1))
        torch.ops.aten._assert_async.msg(
            (x.mask() == mask).all(),
            "PaddedTensor.from_mask: expected True for the first entries of each row; use "
            "JaggedTensor.from_mask(padded, mask).to_padded() for entries elsewhere",
        )
        return x

    @classmethod
    def pad(
        cls, x: Tensor, *, dim: int, multiple: int | None = None, buckets: Buckets | None = None
    ) -> PaddedTensor:
        """Pads a plain tensor along ``dim`` up to a bucket; each row has the length that ``dim`` had.

        The rows are numbered by dimension 0, or by 1 where ``dim`` is 0.
        """
        dim = checks.check_plain(x, dim)
        lengths = torch.full((x.shape[0 if dim else 1],), x.shape[dim], device=x.device)
        padded = widen(x, dim, bucket_of(x.shape[dim], multiple, buckets))
        return cls(padded, lengths, ragged_dim=dim, batch_dim=0 if dim else 1)

    @property
    def ragged_class(self) -> type[PaddedTensor]:
        """The class of the layout."""
        return PaddedTensor

    @classmethod
    def check_loaded(
        cls, padded: Tensor, lengths: Tensor, row_count: Tensor | None, ragged_dim: int, batch_dim: int
    ) -> None:
        """Raises unless the lengths and the number of rows describe rows of the table."""
        checks.check_loaded(padded, lengths, row_count, ragged_dim, batch_dim)

    # ---- rows --------------------------------------------------------------------------------------------------

    def row_lengths(self) -> Tensor:
        """``[B]``: how many entries each row has."""
        return self.lengths

    @property
    def counts(self) -> Tensor:
        """``[B]``: how many entries of each row the table has; a length beyond its width counts as the width."""
        return self.lengths.clamp(0, self.width)

    @property
    def width(self) -> int:
        """``T``: how many positions the table has for each row."""
        extent = self._raw_padded.size(self.ragged_dim)
        return extent // max(self.lengths.size(0), 1) if self.merged else extent

    def mask(self) -> Tensor:
        """``[B, T]``: True where an entry exists; ``[B * T]`` for merged dimensions."""
        exists = torch.arange(self.width, device=self.lengths.device) < self.lengths.unsqueeze(1)
        return exists.flatten() if self.merged else exists

    @property
    def exists(self) -> Tensor:
        """True where an entry exists, ready to broadcast against the table."""
        return exists_in(self._raw_padded, self.lengths, self.ragged_dim, self.batch_dim)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Returns the rows as text; in a trace, where the data is unknown, the inner tensors."""
        return emit_rows(
            self,
            self._raw_padded,
            lambda: self.with_lengths(self._raw_padded, self.counts, self.row_count).to_tensors(),
        )

    # ---- tables and conversions --------------------------------------------------------------------------------

    def kept(self, padded: Tensor, fill: float | int | bool = 0) -> Tensor:
        """Returns a table of these rows with ``fill`` in the padding, which receives no cotangent."""
        exists = exists_in(padded, self.lengths, self.ragged_dim, self.batch_dim)
        return torch.where(exists, padded, padded.new_full((), fill))

    def to_dense(self, fill: float | int | bool = 0) -> Tensor:  # type: ignore[override]
        """Returns the plain table with ``fill`` where there is no entry."""
        return self.kept(self.unwrap("padded"), fill)

    clean = samples = to_dense

    def with_padded(
        self, padded: Tensor, ragged_dim: int | None = None, batch_dim: int | None = None
    ) -> PaddedTensor:
        """Returns another table with the same rows; the arguments are their dimensions, if they differ."""
        return TensorSubclass.__new__(  # no check: the rows are unchanged
            type(self),
            padded,
            self.lengths,
            self.row_count,
            ragged_dim=self.ragged_dim if ragged_dim is None else ragged_dim,
            batch_dim=self.batch_dim if batch_dim is None else batch_dim,
        )

    with_stored = with_padded

    def with_lengths(
        self, padded: Tensor, lengths: Tensor, row_count: Tensor | EllipsisType | None = ...
    ) -> PaddedTensor:
        """Returns other rows at the same dimensions; keeps the row count unless ``row_count`` is given."""
        count = self.row_count if row_count is ... else row_count
        return TensorSubclass.__new__(
            type(self), padded, lengths, count, ragged_dim=self.ragged_dim, batch_dim=self.batch_dim
        )

    def per_row(self, dense: Tensor, dim: int) -> Tensor:
        """Returns a result with one entry for each row along ``dim``, ragged along it if the batch has a row count."""
        if self.row_count is None or self.merged:
            return dense
        return TensorSubclass.__new__(type(self), dense, self.row_count, None, ragged_dim=dim, batch_dim=dim)

    def unmerged(self) -> PaddedTensor:
        """Returns the same rows with separate batch and ragged dimensions; differentiable."""
        if not self.merged:
            return self
        dim, padded = self.batch_dim, self.unwrap("padded")
        size = [*padded.shape[:dim], self.lengths.shape[0], self.width, *padded.shape[dim + 1 :]]
        return self.with_padded(padded.reshape(size), dim + 1, dim)

    def merge(self) -> PaddedTensor:
        """Merges the batch and the ragged dimension, which must be adjacent; differentiable."""
        dim = self.batch_dim
        return self.with_padded(self.unwrap("padded").flatten(dim, dim + 1), dim, dim)

    def like_dense(self, dense: Tensor) -> PaddedTensor:
        """Returns a plain table as a ragged tensor with the rows of this one; differentiable in it.

        Raises:
            ValueError: ``dense`` has another number of rows, or another width.
        """
        checks.check_like(self, dense)
        return self.with_kept(dense)

    def to_tensors(self) -> list[Tensor]:
        """Returns the rows without their batch dimension: views of the table. Reads the lengths on the host."""
        if self.merged:
            return self.unmerged().to_tensors()
        lengths = checks.read_lengths(self)
        dim = self.ragged_dim - (self.batch_dim < self.ragged_dim)
        rows = self.unwrap("padded").unbind(self.batch_dim)[: len(lengths)]
        return [row.narrow(dim, 0, n) for row, n in zip(rows, lengths, strict=True)]

    def to_padded(
        self, *, multiple: int | None = None, buckets: Buckets | None = None, at_least: int = 0
    ) -> PaddedTensor:
        """Returns the same rows in a table as wide as a bucket that fits this one; differentiable.

        Args:
            multiple: the table is as wide as the next multiple of this.
            buckets: the table is as wide as the least of these that fits this one.
            at_least: the table has this many positions or more, for rows that will grow.
        """
        if self.merged:
            return self.unmerged().to_padded(multiple=multiple, buckets=buckets, at_least=at_least).merge()
        width = bucket_of(max(self.width, at_least), multiple, buckets)
        return self.with_padded(widen(self.unwrap("padded"), self.ragged_dim, width))

    def append(self, entries: Tensor) -> PaddedTensor:
        """Appends an entry to every row, in a table of the same width; differentiable, and reads no length on the host.

        Args:
            entries: one for each row, the size of this tensor without its ragged dimension.

        Raises:
            ValueError: ``entries`` have another size.
            RuntimeError: a row fills the table (on CUDA and in graphs by an asynchronous assertion); widen it first by
                ``to_padded(at_least=...)``.
        """
        checks.check_entries(self, entries)
        entries = entries.to_dense() if isinstance(entries, PaddedTensor) else entries
        lengths = self.lengths + 1
        if self.row_count is not None:  # rows beyond the batch stay empty
            rows = torch.arange(lengths.shape[0], device=lengths.device)
            lengths = torch.where(rows < self.row_count, lengths, self.lengths)
        torch.ops.aten._assert_async.msg(
            (lengths <= self.width).all(),
            "append: a row fills the table; widen it by to_padded(at_least=...)",
        )
        longer = self.with_lengths(self._raw_padded, lengths, self.row_count)
        table = torch.where(longer.exists & ~self.exists, entries.unsqueeze(self.ragged_dim), self.to_dense())
        return longer.with_padded(longer.kept(table))

    def to_jagged(self) -> JaggedTensor:
        """Returns the same rows back to back, the batch dimension first; differentiable.

        Reads the lengths on the host. A compiled function does not; its outer extent is the width of the table.
        """
        if self.merged:
            return self.unmerged().to_jagged().flatten(0, 1)  # type: ignore[return-value]
        count = checks.count_rows(self)
        ragged = self.ragged_dim + (self.ragged_dim < self.batch_dim)
        table = self.unwrap("padded").movedim(self.batch_dim, 0).movedim(ragged, 1)
        jagged = JaggedTensor.from_padded(table[:count], self.counts[:count])
        return jagged if ragged == 1 else jagged.with_entries(jagged.unwrap("values"), ragged)


# ---- jagged to padded ------------------------------------------------------------------------------------------


def to_padded(
    self: JaggedTensor, *, multiple: int | None = None, buckets: Buckets | None = None
) -> PaddedTensor:
    """Returns the same rows in a table as wide as a bucket that fits ``T``; differentiable."""
    check_has_rows(self, "to_padded")
    table = widen(self.to_dense(), self.ragged_dim, bucket_of(self.shape[self.ragged_dim], multiple, buckets))
    return PaddedTensor(table, self.counts, ragged_dim=self.ragged_dim, row_count=self.row_count)


JaggedTensor.to_padded = to_padded  # set here, since this module imports the module of JaggedTensor
