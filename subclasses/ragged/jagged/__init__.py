"""``JaggedTensor``: rows of uneven length, back to back.

An entry past a row's length does not exist: every result is what a loop over the rows would give. The outer
size is that of the padded tensor it stands for, ``[B, T, ...]``, so that shapes read and broadcast as they do
for a dense tensor, but only ``total`` entries are stored and computed on.

An outer dimension ``d >= 1`` is dimension ``d - 1`` of ``values``; the ragged one is any of them. A value whose
batch and ragged dimensions were merged (``x.flatten(0, 1)``) has ``ragged_dim=0``, and then both count alike.

The rules for ops stand beside this file, grouped by family; this one has what the class is, how one is made, and
how it converts.
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
from subclasses.ragged.checks import GREATEST_BOUND, check_has_rows, check_mask, check_rows, is_traced
from subclasses.ragged.data_sizes import longest_of, size_of, true_places
from subclasses.ragged.jagged import validation
from subclasses.ragged.jagged.holes import without_gradient_at_holes
from subclasses.ragged.jagged.interface import JaggedInterface
from subclasses.ragged.printing import emit_rows
from subclasses.ragged.segments import Segments
from subclasses.spec.values import dynamic_ints, mark_varying_dims, with_inners

# ---- the declaration -------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _layout_of(cls: Any, present: tuple[str, ...], ragged_dim: int) -> Layout:
    """The layout of rows along a dimension, kept: one of a value that lives for one op would be made at each."""
    return intern_layout(cls, (ragged_dim,), present)


class JaggedTensor(JaggedInterface, TensorSubclass):
    """Rows of uneven length back to back; made from ``(values, offsets)`` or by one of the ``from_`` methods.

    Args:
        values: the entries of all rows, ``[total, ...]``; with another ragged dim the entries are not its first one.
        offsets: ``[B + 1]`` int64, where in ``values`` each row begins, and where the last one ends.
        lengths: ``[B]`` int64, how many entries of each row exist; None: all up to the next row's beginning. Entries
            of ``values`` that belong to no row do not exist, whatever they hold.
        ragged_dim: the outer dimension along which rows differ; 0 for merged batch and ragged dimensions.
        max_length: the outer extent of the ragged dimension, ``T``: an upper bound of the lengths. None computes it
            (one synchronisation on CUDA) and checks the offsets on the way. A given one is believed, up to the number
            of entries or 1,048,576. Loading a file checks offsets, lengths and bound in any case.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or the offsets do not describe rows.
    """

    _instead = "use x.to_dense(fill) with x.mask(), x.to_tensors() or x.unwrap('values')"

    values: Tensor = inner(differentiable=True)
    offsets: Tensor = inner(dtype=torch.int64)
    lengths: Tensor | None = inner(dtype=torch.int64, optional=True)
    ragged_dim: int = static(default=1)
    max_length: int = dynamic()

    def __new__(
        cls,
        values: Tensor,
        offsets: Tensor,
        *,
        lengths: Tensor | None = None,
        ragged_dim: int = 1,
        max_length: int | None = None,
    ) -> Any:
        """Checks that the parts fit together; see the class."""
        validation.check_parts(values, offsets, lengths, ragged_dim)
        if max_length is None:
            max_length = validation.longest_row(values, offsets, lengths, ragged_dim)
        elif type(max_length) is int and max_length > GREATEST_BOUND:
            validation.check_given_bound(values, max_length, ragged_dim)
        values = without_gradient_at_holes(values, offsets, lengths, ragged_dim)
        x = super().__new__(cls, values, offsets, lengths, ragged_dim=ragged_dim, max_length=max_length)
        return x if is_compiling_here() else mark_varying_dims(x)

    if (
        TYPE_CHECKING
    ):  # what type checkers would otherwise derive from the fields, and where values are stored
        _raw_values: Tensor

        def __init__(
            self,
            values: Tensor,
            offsets: Tensor,
            *,
            lengths: Tensor | None = None,
            ragged_dim: int = 1,
            max_length: int | None = None,
        ) -> None: ...

        def to_padded(self, *, multiple: int | None = None, buckets: Sequence[int] | None = None) -> Any:
            """The same rows as a ``PaddedTensor``; stands in ``padded/tensor.py``."""

    @staticmethod
    def outer(values: Tensor, offsets: Tensor, ragged_dim: int, max_length: int) -> Outer:
        """The size of the padded tensor, and the strides that it would have with the rows of ``values``."""
        size, stride = values.size(), values.stride()
        start = values.storage_offset()
        if ragged_dim == 0:
            return Outer(size, stride, storage_offset=start)
        place = ragged_dim - 1
        return Outer(
            (offsets.size(0) - 1, *size[:place], max_length, *size[ragged_dim:]),
            (max_length * stride[place], *stride),
            storage_offset=start,
        )

    # ---- making one --------------------------------------------------------------------------------------------

    @classmethod
    def from_tensors(cls, rows: Sequence[Tensor]) -> JaggedTensor:
        """One row per tensor ``[length, ...]``; differentiable in them.

        Raises:
            ValueError: there is no row, or rows differ in more than their length.
        """
        check_rows(rows)
        lengths = [row.shape[0] for row in rows]
        offsets = torch.tensor([0, *lengths], device=rows[0].device).cumsum(0)
        return cls(torch.cat(list(rows)), offsets, max_length=max(lengths))

    @classmethod
    def of_dense(cls, dense: Tensor) -> JaggedTensor:
        """Rows of one length, all of ``dense [B, T, ...]``; for rules."""
        batch, length = dense.shape[:2]
        offsets = torch.arange(batch + 1, device=dense.device) * length
        return cls(dense.flatten(0, 1), offsets, max_length=length)

    @classmethod
    def from_lengths(
        cls, values: Tensor, lengths: Tensor | Sequence[int], *, max_length: int | None = None
    ) -> JaggedTensor:
        """Rows of these lengths, one after the other in ``values``, which are shared.

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
        """The first ``lengths[b]`` entries of each row of ``padded [B, T, ...]``; differentiable in it.

        In a compiled function, which does not read the lengths, the outer extent is that of ``padded``.
        """
        sizes = torch.as_tensor(lengths, dtype=torch.int64, device=padded.device)
        validation.check_padded(padded, sizes)
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        total, width = size_of(offsets[-1]), padded.shape[1]
        values = Segments(offsets, None, total, width).unpad(padded)
        return cls(values, offsets, max_length=longest_of(sizes, width))

    @classmethod
    def from_mask(cls, padded: Tensor, mask: Tensor) -> JaggedTensor:
        """The entries of ``padded [B, T, ...]`` where ``mask [B, T]`` is True, wherever in their rows; differentiable.

        In a compiled function, which does not read the mask, the outer extent is that of ``padded``.

        Raises:
            ValueError: ``mask`` is no bool tensor of that shape.
        """
        check_mask(padded, mask)
        values = padded.flatten(0, 1).index_select(0, true_places(mask.flatten()))
        return cls.from_lengths(values, sizes := mask.sum(1), max_length=longest_of(sizes, mask.shape[1]))

    @classmethod
    def from_nested(cls, nested: Tensor) -> JaggedTensor:
        """The rows of a ``torch.nested`` tensor of jagged layout, whose values it shares; differentiable in it.

        Raises:
            TypeError: ``nested`` is no nested tensor of jagged layout.
        """
        validation.check_nested(nested)
        offsets = nested.offsets().to(torch.int64)  # type: ignore[attr-defined]
        lengths = nested.lengths()  # type: ignore[attr-defined]
        lengths = None if lengths is None else lengths.to(torch.int64)
        ragged = next(d for d, n in enumerate(nested.shape) if d and not isinstance(n, int))
        return cls(nested.values(), offsets, lengths=lengths, ragged_dim=ragged)

    def _varying_dims(self) -> dict[str, set[int]]:
        """The number of entries and of rows, and the longest row, differ from value to value."""
        entries = max(self.ragged_dim - 1, 0)
        return {"": {0, self.ragged_dim}, "values": {entries}, "offsets": {0}, "lengths": {0}}

    @property
    def ragged_class(self) -> type[JaggedTensor]:
        """The class of the layout."""
        return JaggedTensor

    @classmethod
    def check_loaded(
        cls, values: Tensor, offsets: Tensor, lengths: Tensor | None, ragged_dim: int, max_length: int
    ) -> None:
        """Raises unless offsets and lengths describe rows, none of which is longer than ``max_length``."""
        validation.check_loaded(values, offsets, lengths, ragged_dim, max_length)

    # ---- looking at it -----------------------------------------------------------------------------------------

    @property
    def segments(self) -> Segments:
        """Where the rows lie, with what moves entries between them and a padded table."""
        place = max(self.ragged_dim - 1, 0)
        return Segments(self.offsets, self.lengths, self._raw_values.size(place), self.max_length)

    def row_lengths(self) -> Tensor:
        """``[B]``: how many entries each row has."""
        return self.offsets.diff() if self.lengths is None else self.lengths

    def mask(self) -> Tensor:
        """``[B, T]``: True where an entry exists; ``[total]`` for merged dimensions."""
        if self.ragged_dim:
            return self.segments.mask()
        exists = self.segments.exists
        return (
            self.offsets.new_ones(self._raw_values.shape[0], dtype=torch.bool) if exists is None else exists
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """The rows; while a graph is traced, where nothing is known of them, the parts."""
        return emit_rows(self, self._raw_values, self.to_tensors)

    # ---- taking it apart ---------------------------------------------------------------------------------------

    def kept(self, values: Tensor, fill: float | int | bool = 0) -> Tensor:
        """A tensor shaped as ``values``, with ``fill`` for what does not exist; without holes the same tensor."""
        return (
            values if self.lengths is None else self.trailing(self.segments.keep(self.leading(values), fill))
        )

    def clean_values(self) -> Tensor:
        """The values as a differentiable function of this tensor, with 0 for what does not exist.

        For ops that mix entries: what a hole holds reaches no result, and no gradient comes out of one.
        """
        return self.kept(self.unwrap("values"))

    def entries(self) -> Tensor:
        """The entries of all rows, the ragged dimension first: ``[total, ...]``; 0 for what does not exist."""
        return self.leading(self.clean_values())

    def leading(self, values: Tensor) -> Tensor:
        """A tensor shaped as ``values``, with the ragged dimension in front."""
        return values.movedim(self.ragged_dim - 1, 0) if self.ragged_dim > 1 else values

    def trailing(self, entries: Tensor) -> Tensor:
        """What has the ragged dimension in front, back to the shape of the values."""
        return entries.movedim(0, self.ragged_dim - 1) if self.ragged_dim > 1 else entries

    def with_values(self, values: Tensor, ragged_dim: int | None = None) -> JaggedTensor:
        """Other values for the same rows; ``ragged_dim`` says where their entries are, if elsewhere."""
        layout = self._layout
        place: int = layout.statics[0] if ragged_dim is None else ragged_dim
        held = (
            without_gradient_at_holes(values, self.offsets, self.lengths, place),
            self.offsets,
            self.lengths,
        )
        # The parts fit together as those of this tensor do.
        if not is_bare(values) or layout.nested:
            return TensorSubclass.__new__(type(self), *held, ragged_dim=place, max_length=self.max_length)
        if place != layout.statics[0]:
            layout = _layout_of(layout.cls, layout.present, place)
        if values.requires_grad:
            return construct(layout, dynamic_ints(self), *held)
        return with_inners(self, held, layout)

    def with_entries(self, entries: Tensor, ragged_dim: int | None = None) -> JaggedTensor:
        """Other entries ``[total, ...]`` for the same rows."""
        ragged_dim = self.ragged_dim if ragged_dim is None else ragged_dim
        return self.with_values(entries.movedim(0, max(ragged_dim - 1, 0)), ragged_dim)

    def like_dense(self, dense: Tensor) -> JaggedTensor:
        """The entries that a dense tensor of the outer size has where this one has its own; differentiable in it.

        Raises:
            ValueError: ``dense`` has another size.
        """
        validation.check_like(self, dense)
        return self.from_table(dense)

    def to_dense(self, fill: float | int | bool = 0) -> Tensor:  # type: ignore[override]
        """The padded tensor of the outer size, with ``fill`` where there is no entry."""
        if self.ragged_dim == 0:
            return self.segments.keep(self.unwrap("values"), fill)
        table = self.segments.pad(self.leading(self.unwrap("values")), fill)
        return table.movedim(1, self.ragged_dim)

    def to_nested(self) -> Tensor:
        """The same rows as a ``torch.nested`` tensor of jagged layout, which shares the values."""
        check_has_rows(self, "to_nested")
        return torch.nested.nested_tensor_from_jagged(
            self.unwrap("values"), self.offsets, self.lengths, jagged_dim=self.ragged_dim
        )
