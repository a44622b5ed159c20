"""``JaggedTensor``: rows of uneven length, back to back.

An entry past a row's length does not exist: a loop over the rows returns the same results. The outer size is the size
of the padded tensor, ``[B, T, ...]``, so that shapes broadcast as for a dense tensor. But only ``total`` entries are
stored and computed.

An outer dimension ``d >= 1`` is dimension ``d - 1`` of ``values``; any of them may be the ragged dimension.
``x.flatten(0, 1)`` merges the batch and the ragged dimension. Its result has ``ragged_dim=0``, and its dimensions are
the dimensions of ``values``.

This module has the class, its constructors and its conversions. The other modules of this folder have the rules for ops
by family.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subclasses import Outer, TensorSubclass, dynamic, inner, static
from subclasses._torch_tracing import is_bare, is_compiling_here
from subclasses.autograd.construct import construct
from subclasses.layout import Layout, intern_layout
from subclasses.ragged.checks import (
    GREATEST_BOUND,
    check_all_exist,
    check_has_rows,
    check_mask,
    check_rows,
    is_traced,
)
from subclasses.ragged.data_sizes import longest_of, size_of, true_positions
from subclasses.ragged.jagged import validation
from subclasses.ragged.jagged.holes import without_gradient_at_holes
from subclasses.ragged.jagged.interface import JaggedInterface
from subclasses.ragged.jagged.packing import pack_rows
from subclasses.ragged.printing import emit_rows
from subclasses.ragged.segments import Segments
from subclasses.spec.values import mark_varying_dims

# ---- the declaration -------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _layout_of(cls: Any, present: tuple[str, ...], ragged_dim: int) -> Layout:
    """Returns the layout of rows along a dimension; cached, since each op would make one for its temporary results."""
    return intern_layout(cls, (ragged_dim,), present)


class JaggedTensor(JaggedInterface, TensorSubclass):
    """Rows of uneven length back to back; made from ``(values, offsets)`` or by one of the ``from_`` methods.

    Args:
        values: the entries of all rows, ``[total, ...]``; a greater ``ragged_dim`` has them along ``ragged_dim - 1``.
        offsets: ``[B + 1]`` int64, the start of each row in ``values``, and the end of the last row.
        lengths: ``[B]`` int64, how many entries of each row exist; None: all up to the start of the next row. Entries
            of ``values`` that belong to no row do not exist, and may have any values.
        count: ``[]`` int64, how many rows exist; None: all. The rows from ``count`` on are spare: they hold the tail of
            a fixed number of entries, and exist for no result and no gradient. `pack` makes them. The constructor
            compares ``count`` with the rows only where it computes ``max_length``.
        ragged_dim: the outer dimension along which rows differ; 0 for merged batch and ragged dimensions.
        max_length: the outer extent of the ragged dimension, ``T``: an upper bound of the lengths. None computes it
            (one synchronisation on CUDA) and checks the offsets. The constructor does not compare a given bound with
            the rows. It may be up to the greater of the number of entries and 1,048,576. Loading a file always checks
            offsets, lengths and bound.

    Raises:
        ValueError: shapes, dtypes or devices do not match, or the offsets do not describe rows.
    """

    _instead = "use x.to_dense(fill) with x.mask(), x.to_tensors() or x.unwrap('values')"

    values: Tensor = inner(differentiable=True)
    offsets: Tensor = inner(dtype=torch.int64)
    lengths: Tensor | None = inner(dtype=torch.int64, optional=True)
    count: Tensor | None = inner(dtype=torch.int64, optional=True)
    ragged_dim: int = static(default=1)
    max_length: int = dynamic()

    def __new__(
        cls,
        values: Tensor,
        offsets: Tensor,
        *,
        lengths: Tensor | None = None,
        count: Tensor | None = None,
        ragged_dim: int = 1,
        max_length: int | None = None,
    ) -> Any:
        """Checks that the arguments match; see the class."""
        validation.check_parts(values, offsets, lengths, count, ragged_dim)
        if max_length is None:
            max_length = validation.longest_row(values, offsets, lengths, count, ragged_dim)
        elif type(max_length) is int and max_length > GREATEST_BOUND:
            validation.check_given_bound(values, max_length, ragged_dim)
        values = without_gradient_at_holes(values, offsets, lengths, count, ragged_dim)
        x = super().__new__(
            cls, values, offsets, lengths, count, ragged_dim=ragged_dim, max_length=max_length
        )
        return x if is_compiling_here() else mark_varying_dims(x)

    if (
        TYPE_CHECKING
    ):  # for type checkers: the stored values, and a signature that the fields do not determine
        _raw_values: Tensor

        def __init__(
            self,
            values: Tensor,
            offsets: Tensor,
            *,
            lengths: Tensor | None = None,
            count: Tensor | None = None,
            ragged_dim: int = 1,
            max_length: int | None = None,
        ) -> None: ...

        def to_padded(self, *, multiple: int | None = None, buckets: Sequence[int] | None = None) -> Any:
            """Returns the same rows as a ``PaddedTensor``; defined in ``padded/tensor.py``."""

    @staticmethod
    def outer(values: Tensor, offsets: Tensor, ragged_dim: int, max_length: int) -> Outer:
        """Returns the size of the padded tensor, and its strides if it had the rows of ``values``."""
        size, stride, start = values.shape, values.stride(), values.storage_offset()
        if ragged_dim == 0:
            return Outer(size, stride, None, None, start)
        size = [offsets.shape[0] - 1, *size]
        size[ragged_dim] = max_length
        return Outer(size, (max_length * stride[ragged_dim - 1], *stride), None, None, start)

    # ---- constructors ------------------------------------------------------------------------------------------

    @classmethod
    def from_tensors(cls, rows: Sequence[Tensor]) -> JaggedTensor:
        """Makes one row per tensor ``[length, ...]``; differentiable in the tensors.

        Raises:
            ValueError: there is no row, or rows differ in more than their length.
        """
        check_rows(rows)
        lengths = [row.shape[0] for row in rows]
        offsets = torch.tensor([0, *lengths], device=rows[0].device).cumsum(0)
        return cls(torch.cat(list(rows)), offsets, max_length=max(lengths))

    @classmethod
    def pack(
        cls, tensors: Sequence[Tensor], *, tokens: int, rows: int | None = None, longest: int | None = None
    ) -> JaggedTensor:
        """Makes one row per tensor ``[length, ...]`` in a batch of fixed size; differentiable in the tensors.

        All batches of one budget have the same sizes, so one compiled program and one CUDA graph serve them. Entries
        past the rows are zeros, in spare rows that exist for no result and no gradient.

        Args:
            tensors: the rows that exist.
            tokens: the number of entries, spare rows included.
            rows: the outer extent of the batch, spare rows included. None: as many as the batch needs.
            longest: the outer extent ``T``, and the greatest length of a row. None: the length of the longest row.

        Raises:
            ValueError: there is no row, rows differ in more than their length, or they exceed a budget.
        """
        values, offsets, count, width = pack_rows(tensors, tokens, rows, longest)
        return cls(values, offsets, count=count, max_length=width)

    @classmethod
    def of_dense(cls, dense: Tensor) -> JaggedTensor:
        """Makes rows of equal length from ``dense [B, T, ...]``; for rules."""
        batch, length = dense.shape[:2]
        offsets = torch.arange(batch + 1, device=dense.device) * length
        return cls(dense.flatten(0, 1), offsets, max_length=length)

    @classmethod
    def from_lengths(
        cls, values: Tensor, lengths: Tensor | Sequence[int], *, max_length: int | None = None
    ) -> JaggedTensor:
        """Makes rows of these lengths, back to back in ``values``, which it shares.

        Args:
            values: the entries of all rows, ``[total, ...]``.
            lengths: ``[B]``, how many entries each row has.
            max_length: the outer extent ``T``; None computes it, which a compiled function cannot.

        Raises:
            ValueError: the lengths do not add up to the number of entries.
        """
        sizes = torch.as_tensor(lengths, dtype=torch.int64)
        validation.check_lengths(values, sizes)
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).to(values.device)
        if max_length is None and not isinstance(lengths, Tensor):
            max_length = max(lengths, default=0)
        elif max_length is None and not is_traced(sizes):
            max_length = longest_of(sizes, 0)
        return cls(values, offsets, max_length=max_length)

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Tensor | Sequence[int]) -> JaggedTensor:
        """Makes rows of the first ``lengths[b]`` entries of each row of ``padded [B, T, ...]``; differentiable in it.

        In a compiled function, which does not read the lengths, the outer extent is the extent of ``padded``.
        """
        sizes = torch.as_tensor(lengths, dtype=torch.int64, device=padded.device)
        validation.check_padded(padded, sizes)
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        total, width = size_of(offsets[-1]), padded.shape[1]
        values = Segments(offsets, None, total, width).unpad(padded)
        return cls(values, offsets, max_length=longest_of(sizes, width))

    @classmethod
    def from_mask(cls, padded: Tensor, mask: Tensor) -> JaggedTensor:
        """Makes rows of the entries of ``padded [B, T, ...]`` where ``mask [B, T]`` is True; differentiable.

        The entries may be anywhere in their rows. In a compiled function, which does not read the mask, the outer
        extent is the extent of ``padded``.

        Raises:
            ValueError: ``mask`` is not a bool tensor of that shape.
        """
        check_mask(padded, mask)
        values = padded.flatten(0, 1).index_select(0, true_positions(mask.flatten()))
        return cls.from_lengths(values, sizes := mask.sum(1), max_length=longest_of(sizes, mask.shape[1]))

    @classmethod
    def from_nested(cls, nested: Tensor) -> JaggedTensor:
        """Makes the rows of a ``torch.nested`` tensor of jagged layout, whose values it shares; differentiable in it.

        Raises:
            TypeError: ``nested`` is not a nested tensor of jagged layout.
        """
        validation.check_nested(nested)
        offsets = nested.offsets().to(torch.int64)  # type: ignore[attr-defined]
        lengths = nested.lengths()  # type: ignore[attr-defined]
        lengths = None if lengths is None else lengths.to(torch.int64)
        ragged = next(d for d, n in enumerate(nested.shape) if d and not isinstance(n, int))
        return cls(nested.values(), offsets, lengths=lengths, ragged_dim=ragged)

    def _varying_dims(self) -> dict[str, set[int]]:
        """Returns the dimensions that vary: the number of entries and of rows, and the longest row."""
        entries = max(self.ragged_dim - 1, 0)
        return {"": {0, self.ragged_dim}, "values": {entries}, "offsets": {0}, "lengths": {0}}

    @property
    def ragged_class(self) -> type[JaggedTensor]:
        """The class of the layout."""
        return JaggedTensor

    @classmethod
    def check_loaded(
        cls,
        values: Tensor,
        offsets: Tensor,
        lengths: Tensor | None,
        count: Tensor | None,
        ragged_dim: int,
        max_length: int,
    ) -> None:
        """Raises unless offsets, lengths and count describe rows, none of which is longer than ``max_length``."""
        validation.check_loaded(values, offsets, lengths, count, ragged_dim, max_length)

    # ---- rows --------------------------------------------------------------------------------------------------

    @property
    def segments(self) -> Segments:
        """The `Segments` of the rows, which copy entries between rows and a padded table."""
        values_dim = max(self.ragged_dim - 1, 0)
        total = self._raw_values.size(values_dim)
        return Segments(self.offsets, self.lengths, total, self.max_length, self.count)

    def row_lengths(self) -> Tensor:
        """``[B]``: how many entries each row has; ``[count]`` if there is a count, which is read on the host."""
        counts = self.counts
        return counts if self.count is None else counts.narrow(0, 0, size_of(self.count))

    def mask(self) -> Tensor:
        """``[B, T]``: True where an entry exists; ``[total]`` for merged dimensions."""
        if self.ragged_dim:
            return self.segments.mask()
        exists = self.segments.exists
        return (
            self.offsets.new_ones(self._raw_values.shape[0], dtype=torch.bool) if exists is None else exists
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Returns the rows as text; in a trace, where the data is unknown, the inner tensors."""
        return emit_rows(self, self._raw_values, self.to_tensors)

    # ---- values and conversions --------------------------------------------------------------------------------

    def kept(self, values: Tensor, fill: float | int | bool = 0) -> Tensor:
        """Returns a tensor with the shape of ``values`` and ``fill`` in holes; without holes the same tensor."""
        if self.lengths is None and self.count is None:
            return values
        return self.trailing(self.segments.keep(self.leading(values), fill))

    def clean_values(self) -> Tensor:
        """Returns the values as a differentiable function of this tensor, with 0 in holes.

        For ops that mix entries: no result depends on a hole, and no hole receives a gradient.
        """
        return self.kept(self.unwrap("values"))

    def entries(self) -> Tensor:
        """Returns the entries of all rows, the ragged dimension first: ``[total, ...]``; 0 in holes."""
        return self.leading(self.clean_values())

    def leading(self, values: Tensor) -> Tensor:
        """Moves the ragged dimension of a tensor with the shape of ``values`` to the front."""
        return values.movedim(self.ragged_dim - 1, 0) if self.ragged_dim > 1 else values

    def trailing(self, entries: Tensor) -> Tensor:
        """Moves the ragged dimension of ``entries`` from the front to its dimension in ``values``."""
        return entries.movedim(0, self.ragged_dim - 1) if self.ragged_dim > 1 else entries

    def with_values(self, values: Tensor, ragged_dim: int | None = None) -> JaggedTensor:
        """Returns other values for the same rows; ``ragged_dim`` is their ragged dimension, if it differs."""
        layout, width = self._layout, self.max_length
        dim: int = layout.statics[0] if ragged_dim is None else ragged_dim
        offsets, lengths, count = self.offsets, self.lengths, self.count
        if lengths is not None or count is not None:
            values = without_gradient_at_holes(values, offsets, lengths, count, dim)
        # No check: the rows are unchanged.
        if not is_bare(values) or layout.nested:
            rows = offsets, lengths, count
            return TensorSubclass.__new__(type(self), values, *rows, ragged_dim=dim, max_length=width)
        if dim != layout.statics[0]:
            layout = _layout_of(layout.cls, layout.present, dim)
        if values.requires_grad:
            return construct(layout, (width,), values, offsets, lengths, count)
        return layout.cls._wrap(layout, values, offsets, lengths, count, width)  # type: ignore[attr-defined]

    def with_entries(self, entries: Tensor, ragged_dim: int | None = None) -> JaggedTensor:
        """Returns other entries ``[total, ...]`` for the same rows."""
        ragged_dim = self.ragged_dim if ragged_dim is None else ragged_dim
        return self.with_values(entries.movedim(0, max(ragged_dim - 1, 0)), ragged_dim)

    def like_dense(self, dense: Tensor) -> JaggedTensor:
        """Returns the entries of a dense tensor of the outer size, with the rows of this tensor; differentiable in it.

        Raises:
            ValueError: ``dense`` has another size.
        """
        validation.check_like(self, dense)
        return self.from_table(dense)

    def to_dense(self, fill: float | int | bool = 0) -> Tensor:  # type: ignore[override]
        """Returns the padded tensor of the outer size, with ``fill`` where there is no entry."""
        if self.ragged_dim == 0:
            return self.segments.keep(self.unwrap("values"), fill)
        table = self.segments.pad(self.leading(self.unwrap("values")), fill)
        return table.movedim(1, self.ragged_dim)

    def to_nested(self) -> Tensor:
        """Returns the same rows as a ``torch.nested`` tensor of jagged layout, which shares the values."""
        check_has_rows(self, "to_nested")
        check_all_exist(self, "to_nested")
        return torch.nested.nested_tensor_from_jagged(
            self.unwrap("values"), self.offsets, self.lengths, jagged_dim=self.ragged_dim
        )
