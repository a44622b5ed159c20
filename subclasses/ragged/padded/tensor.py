"""``PaddedTensor``: rows of uneven length in a dense table, with their lengths on the device.

The same semantics as ``JaggedTensor``: an entry past a row's length does not exist. What the table holds there, NaN
included, reaches no result and no gradient: it is replaced where entries come together (``to_dense``, with a fill
that changes nothing), and a cotangent is cut off where rows enter and leave (``kept``). In between, pointwise ops
may compute on it what they like.

No length is ever read on the host, so one compiled program serves all lengths of a bucket.

Where ``ragged_dim`` and ``batch_dim`` are the same, batch and ragged dimension are merged: row by row one after the
other, each with its padding. A merged tensor of one row is one that is ragged along that dimension; with a row count
that is what a reduction over the ragged dimension gives.
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
        padded: the table; entries past a row's length may hold anything.
        lengths: ``[B]`` int64 on the device of the table, how many entries of each row exist. They are not read
            here; one beyond ``T`` counts as ``T``.
        ragged_dim: the dimension of ``padded`` along which rows differ.
        batch_dim: the dimension of ``padded`` that numbers the rows.
        row_count: ``[1]`` int64, how many rows the batch has where the table has more; those behind have length 0, and
            what a reduction over the ragged dimension makes of them does not exist. None: all rows of the table.

    Raises:
        ValueError: shapes, dimensions or devices do not fit together.
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
        """Checks that the parts fit together; see the class."""
        ragged_dim, batch_dim = checks.check_parts(padded, lengths, ragged_dim, batch_dim, row_count)
        if isinstance(padded, Tensor) and padded.requires_grad and torch.is_grad_enabled():
            padded = torch.where(exists_in(padded, lengths, ragged_dim, batch_dim), padded, 0)
        return super().__new__(cls, padded, lengths, row_count, ragged_dim=ragged_dim, batch_dim=batch_dim)

    if (
        TYPE_CHECKING
    ):  # what type checkers would otherwise derive from the fields, and where the table is stored
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

    # ---- making one --------------------------------------------------------------------------------------------

    @classmethod
    def of_dense(cls, dense: Tensor) -> PaddedTensor:
        """Rows of one length, all of ``dense [B, T, ...]``; for rules."""
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
        """One row per tensor ``[length, ...]``, padded up to a bucket; differentiable in them.

        Args:
            rows: tensors that differ in their first extent alone.
            multiple: the table is as wide as the next multiple of this.
            buckets: the table is as wide as the least of these that holds the longest row; "powers": of two.
            batch_multiple: the table has as many rows as the next multiple of this. Those past the given ones have
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
        """Rows sorted into tables by their length, with less padding than one table; differentiable in them.

        A gradient that is summed over the tables is that of one table. Widths that suit the lengths of a data set are
        what ``propose_buckets`` gives; a compiled function has a program for each.

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
        """The table ``padded [B, T, ...]``, of which ``mask [B, T]`` says which entries exist; differentiable.

        Raises:
            ValueError: ``mask`` is no bool tensor of that shape.
            RuntimeError: in some row not the first entries are those that exist (on CUDA, and in graphs, by an
                assertion that nothing waits for); ``JaggedTensor.from_mask`` takes entries from anywhere.
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
        """A plain tensor padded along ``dim`` up to a bucket; each row has the length that ``dim`` had.

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
        """Raises unless the lengths and the number of rows are those of rows of the table."""
        checks.check_loaded(padded, lengths, row_count, ragged_dim, batch_dim)

    # ---- looking at it -----------------------------------------------------------------------------------------

    def row_lengths(self) -> Tensor:
        """``[B]``: how many entries each row has."""
        return self.lengths

    @property
    def counts(self) -> Tensor:
        """``[B]``: how many entries of each row the table holds, which is what counts of lengths beyond it."""
        return self.lengths.clamp(0, self.width)

    @property
    def width(self) -> int:
        """``T``: how many places the table has for each row."""
        places = self._raw_padded.size(self.ragged_dim)
        return places // max(self.lengths.size(0), 1) if self.merged else places

    def mask(self) -> Tensor:
        """``[B, T]``: True where an entry exists; ``[B * T]`` for merged dimensions."""
        exists = torch.arange(self.width, device=self.lengths.device) < self.lengths.unsqueeze(1)
        return exists.flatten() if self.merged else exists

    @property
    def exists(self) -> Tensor:
        """True where an entry exists, ready to broadcast against the table."""
        return exists_in(self._raw_padded, self.lengths, self.ragged_dim, self.batch_dim)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """The rows; while a graph is traced, where nothing is known of them, the parts."""
        return emit_rows(
            self,
            self._raw_padded,
            lambda: self.with_lengths(self._raw_padded, self.counts, self.row_count).to_tensors(),
        )

    # ---- taking it apart ---------------------------------------------------------------------------------------

    def kept(self, padded: Tensor, fill: float | int | bool = 0) -> Tensor:
        """A table of these rows with ``fill`` in the padding; no cotangent comes back from there."""
        exists = exists_in(padded, self.lengths, self.ragged_dim, self.batch_dim)
        return torch.where(exists, padded, padded.new_full((), fill))

    def to_dense(self, fill: float | int | bool = 0) -> Tensor:  # type: ignore[override]
        """The plain table with ``fill`` where there is no entry."""
        return self.kept(self.unwrap("padded"), fill)

    clean = samples = to_dense

    def with_padded(
        self, padded: Tensor, ragged_dim: int | None = None, batch_dim: int | None = None
    ) -> PaddedTensor:
        """Another table with the same rows; the dimensions say where they are, if elsewhere."""
        return TensorSubclass.__new__(  # the parts fit together as those of this tensor do
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
        """Other rows at the same dimensions; as many of them are real as here unless ``row_count`` is given."""
        count = self.row_count if row_count is ... else row_count
        return TensorSubclass.__new__(
            type(self), padded, lengths, count, ragged_dim=self.ragged_dim, batch_dim=self.batch_dim
        )

    def per_row(self, dense: Tensor, dim: int) -> Tensor:
        """A result with one entry for each row along ``dim``: ragged along it where not all rows are of the batch."""
        if self.row_count is None or self.merged:
            return dense
        return TensorSubclass.__new__(type(self), dense, self.row_count, None, ragged_dim=dim, batch_dim=dim)

    def unmerged(self) -> PaddedTensor:
        """The same rows with a dimension each for batch and ragged; differentiable."""
        if not self.merged:
            return self
        dim, padded = self.batch_dim, self.unwrap("padded")
        size = [*padded.shape[:dim], self.lengths.shape[0], self.width, *padded.shape[dim + 1 :]]
        return self.with_padded(padded.reshape(size), dim + 1, dim)

    def merge(self) -> PaddedTensor:
        """Batch and ragged dimension, which follow each other, as one; differentiable."""
        dim = self.batch_dim
        return self.with_padded(self.unwrap("padded").flatten(dim, dim + 1), dim, dim)

    def like_dense(self, dense: Tensor) -> PaddedTensor:
        """A plain table of these rows as a ragged one; differentiable in it.

        Raises:
            ValueError: it has another number of rows, or another width.
        """
        checks.check_like(self, dense)
        return self.with_kept(dense)

    def to_tensors(self) -> list[Tensor]:
        """The rows, without their batch dimension: views of the table. Reads the lengths."""
        if self.merged:
            return self.unmerged().to_tensors()
        lengths = checks.read_lengths(self)
        place = self.ragged_dim - (self.batch_dim < self.ragged_dim)
        rows = self.unwrap("padded").unbind(self.batch_dim)[: len(lengths)]
        return [row.narrow(place, 0, n) for row, n in zip(rows, lengths, strict=True)]

    def to_padded(
        self, *, multiple: int | None = None, buckets: Buckets | None = None, at_least: int = 0
    ) -> PaddedTensor:
        """The same rows in a table as wide as a bucket that holds this one; differentiable.

        Args:
            multiple: the table is as wide as the next multiple of this.
            buckets: the table is as wide as the least of these that holds this one.
            at_least: the table has this many places or more, for rows that will grow.
        """
        if self.merged:
            return self.unmerged().to_padded(multiple=multiple, buckets=buckets, at_least=at_least).merge()
        width = bucket_of(max(self.width, at_least), multiple, buckets)
        return self.with_padded(widen(self.unwrap("padded"), self.ragged_dim, width))

    def append(self, entries: Tensor) -> PaddedTensor:
        """Every row longer by one entry, in a table of the same width; differentiable, and no length is read.

        Args:
            entries: one for each row, the size of this tensor without its ragged dimension.

        Raises:
            ValueError: they have another size.
            RuntimeError: a row fills the table (on CUDA, and in graphs, by an assertion that nothing waits for); make
                it wider before by ``to_padded(at_least=...)``.
        """
        checks.check_entries(self, entries)
        entries = entries.to_dense() if isinstance(entries, PaddedTensor) else entries
        lengths = self.lengths + 1
        if self.row_count is not None:  # rows that the batch has not stay empty
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
        """The same rows back to back, the batch dimension first; differentiable.

        Reads the lengths. In a compiled function, which does not, the outer extent is the width of the table.
        """
        if self.merged:
            return self.unmerged().to_jagged().flatten(0, 1)  # type: ignore[return-value]
        found = checks.count_rows(self)
        ragged = self.ragged_dim + (self.ragged_dim < self.batch_dim)
        table = self.unwrap("padded").movedim(self.batch_dim, 0).movedim(ragged, 1)
        jagged = JaggedTensor.from_padded(table[:found], self.counts[:found])
        return jagged if ragged == 1 else jagged.with_entries(jagged.unwrap("values"), ragged)


# ---- jagged to padded ------------------------------------------------------------------------------------------


def to_padded(
    self: JaggedTensor, *, multiple: int | None = None, buckets: Buckets | None = None
) -> PaddedTensor:
    """The same rows in a table as wide as a bucket that holds ``T``; differentiable."""
    check_has_rows(self, "to_padded")
    table = widen(self.to_dense(), self.ragged_dim, bucket_of(self.shape[self.ragged_dim], multiple, buckets))
    return PaddedTensor(table, self.row_lengths(), ragged_dim=self.ragged_dim)


JaggedTensor.to_padded = to_padded  # stands here, since a file that it would need stands on that of its class
