"""Rows back to back: their offsets, and copies between them and a padded table.

``values`` has the shape ``[total, ...]`` here: the *entries* of all rows, with the ragged dimension first. A padded
table has the shape ``[B, T, ...]``. All functions are plain PyTorch on the device of the offsets, and differentiable in
``values``. They read no data, so they trace with symbolic sizes and never wait for a GPU.

Entries are moved by a scatter or gather with precomputed slots, whose derivatives are again a gather or scatter. There
is not a table of ``B * T`` indices, so the cost depends on the number of entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# ---- rows ------------------------------------------------------------------------------------------------------


class once:
    """A property computed at its first use; ``functools.cached_property`` without the lock that Dynamo refuses."""

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        self.compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, x: Any, owner: type | None = None) -> Any:
        if x is None:
            return self
        value = self.compute(x)
        object.__setattr__(x, self.name, value)
        return value


@dataclass(frozen=True, eq=False)
class Segments:
    """``B`` rows of at most ``width`` entries each, within ``total`` entries.

    Attributes:
        offsets: ``[B + 1]``, where each row begins.
        lengths: ``[B]``, how many entries of each row exist; None: all up to the start of the next row. Entries in no
            row ("holes") do not exist, and may have any values.
        total: number of entries, holes included.
        width: an upper bound of the lengths, ``T``.
        existing: ``[]``, how many rows exist; None: all. The others are spare: their entries are holes too.
    """

    offsets: Tensor
    lengths: Tensor | None
    total: int
    width: int
    existing: Tensor | None = None

    @property
    def count(self) -> int:
        """The number of rows, ``B``, spare ones included."""
        return self.offsets.shape[0] - 1

    @property
    def has_gaps(self) -> bool:
        """Whether there may be holes."""
        return self.lengths is not None or self.existing is not None

    @once
    def row_lengths(self) -> Tensor:
        """``[B]``: the number of existing entries in each row; 0 in a spare one."""
        lengths = self.offsets.diff() if self.lengths is None else self.lengths
        if self.existing is None:
            return lengths
        return torch.where(torch.arange(self.count, device=lengths.device) < self.existing, lengths, 0)

    @once
    def _owner(self) -> Tensor:
        """``[total]``: the row whose beginning precedes each entry; -1 before the first row."""
        return torch.bucketize(self._index, self.offsets, right=True) - 1

    @property
    def _index(self) -> Tensor:
        return torch.arange(self.total, device=self.offsets.device, dtype=self.offsets.dtype)

    @once
    def positions(self) -> Tensor:
        """``[total]``: the position of each entry in its row, from 0."""
        return self._index - self.offsets.index_select(0, self._owner.clamp(min=0))

    @once
    def exists(self) -> Tensor | None:
        """``[total]``: True for entries that belong to a row; None if all do."""
        if not self.has_gaps:
            return None
        if self.lengths is None:
            return self._index < self._end
        owner = self._owner
        inside = (owner >= 0) & (owner < self.count)
        reach = torch.cat([self.row_lengths, self.offsets.new_zeros(1)]).index_select(0, owner.clamp(min=0))
        return inside & (self.positions < reach)

    @property
    def _end(self) -> Tensor:
        """``[1]``: where the spare rows begin."""
        return self.offsets.index_select(0, self.existing.view(1))  # type: ignore[union-attr]

    @once
    def rows(self) -> Tensor:
        """``[total]``: the row of each entry; ``B`` for a hole."""
        return self._owner if self.exists is None else torch.where(self.exists, self._owner, self.count)

    @once
    def _slots(self) -> Tensor:
        """``[total]``: the index of each entry in a flattened table; ``B * T`` for a hole."""
        slots = self._owner * self.width + self.positions
        return slots if self.exists is None else torch.where(self.exists, slots, self.count * self.width)

    @property
    def _spare(self) -> int:
        """The number of additional positions, to which holes are written."""
        return int(self.has_gaps)

    # ---- a table and back --------------------------------------------------------------------------------------

    def mask(self) -> Tensor:
        """``[B, T]``: True where an entry exists."""
        columns = torch.arange(self.width, device=self.offsets.device, dtype=self.offsets.dtype)
        return columns < self.row_lengths.unsqueeze(1)

    def pad(self, values: Tensor, fill: float | int | bool = 0) -> Tensor:
        """Scatters ``[total, ...]`` into ``[B, T, ...]``, with ``fill`` where there is no entry."""
        size = self.count * self.width
        table = values.new_full((size + self._spare, *values.shape[1:]), fill)
        table = table.index_copy(0, self._slots, values)
        table = table.narrow(0, 0, size) if self._spare else table
        return table.view(self.count, self.width, *values.shape[1:])

    def unpad(self, table: Tensor) -> Tensor:
        """Gathers ``[B, T, ...]`` into ``[total, ...]``; 0 in holes."""
        flat = table.flatten(0, 1)
        return self._take(flat, self._slots, flat.shape[0])

    # ---- along the rows ----------------------------------------------------------------------------------------

    def spread_rows(self, per_row: Tensor) -> Tensor:
        """Expands ``[B, ...]`` to ``[total, ...]``: each entry gets the value of its row."""
        return self._take(per_row, self.rows, self.count)

    def spread_positions(self, per_position: Tensor) -> Tensor:
        """Expands ``[T, ...]`` to ``[total, ...]``: each entry gets the value of its position."""
        return self._take(per_position, self.positions, self.width)

    def sum_rows(self, values: Tensor) -> Tensor:
        """Reduces ``[total, ...]`` to ``[B, ...]``: the sum of each row, 0 for an empty one."""
        return self._add(values, self.rows, self.count)

    def sum_positions(self, values: Tensor) -> Tensor:
        """Reduces ``[total, ...]`` to ``[T, ...]``: the sum over the rows that reach each position."""
        if self.exists is None:
            return self._add(values, self.positions, self.width)
        return self._add(values, torch.where(self.exists, self.positions, self.width), self.width)

    def keep(self, values: Tensor, fill: float | int | bool = 0) -> Tensor:
        """Returns ``values`` with ``fill`` in holes; the same tensor if there are none."""
        if self.exists is None:
            return values
        return torch.where(_trailing(self.exists, values), values, values.new_full((), fill))

    def number(self) -> Tensor | int:
        """Returns how many entries exist: a plain size without holes, else a tensor (never a synchronisation)."""
        if not self.has_gaps:
            return self.total
        return self._end.squeeze(0) if self.lengths is None else self.row_lengths.sum()

    def _take(self, source: Tensor, index: Tensor, size: int) -> Tensor:
        if self.exists is None:
            return source.index_select(0, index)
        if size == 0:  # then no entry exists
            return source.new_zeros(self.total, *source.shape[1:])
        # A clamped index reads any value for a hole; `keep` drops the value and its cotangent.
        return self.keep(source.index_select(0, index.clamp(min=0, max=size - 1)))

    def _add(self, values: Tensor, index: Tensor, size: int) -> Tensor:
        # Half precision is summed in float32 and integers in int64, as torch.sum does.
        wide = sum_dtype(values.dtype)
        bins = torch.zeros(size + self._spare, *values.shape[1:], dtype=wide, device=values.device)
        sums = bins.index_add(0, index, values.to(wide))
        sums = sums.narrow(0, 0, size) if self._spare else sums
        return sums.to(values.dtype) if values.dtype.is_floating_point else sums


def _trailing(mask: Tensor, values: Tensor) -> Tensor:
    """``mask`` of shape ``[total]``, ready to broadcast against ``values``."""
    return mask.view(-1, *[1] * (values.dim() - 1))


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which values of a dtype are summed."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64
