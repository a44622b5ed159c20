"""What works within entries that lie back to back, and products of them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.einsum import Parts, implement_einsum
from subclasses.ragged.entries import Entries, implement_composites, implement_entries
from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.margins import implement_margins
from subclasses.ragged.norms import implement_norms_of_channels
from subclasses.ragged.reductions import ragged_dim_after
from subclasses.ragged.rows import alongside, name_of, shown
from subclasses.ragged.strided import implement_strided
from subclasses.ragged.views import feature_place


def _with_entries(x: JaggedTensor, values: Tensor, place: tuple[int, int]) -> JaggedTensor:
    y = x.with_values(values, _ragged_dim(x, place))
    return y if x.lengths is None else y.with_values(y.kept(values))


def _from_table(x: JaggedTensor, table: Tensor, place: tuple[int, int]) -> JaggedTensor:
    ragged = _ragged_dim(x, place)
    if ragged == 0:
        return x.with_values(x.segments.keep(table), 0)
    return x.with_entries(x.segments.unpad(table.movedim(ragged, 1)), ragged)


def _ragged_dim(x: JaggedTensor, place: tuple[int, int]) -> int:
    if place[0] != 0:
        raise DispatchError(
            f"einsum: the rows of {shown(x)} come first in the result as well; put their letter first there"
        )
    return place[1]


implement_einsum(
    JaggedTensor,
    Parts(
        places=lambda x: (0, x.ragged_dim),
        align=functools.partial(alongside, "einsum"),
        entries=lambda x: (x.clean_values(), [0] if x.ragged_dim else []),
        with_entries=_with_entries,
        table=lambda x: x.to_dense(),
        from_table=_from_table,
        per_row=lambda x, table, dim: table,
        shown=shown,
    ),
)


def _rearrange(x: JaggedTensor, source: Callable[[Tensor, Tensor], Tensor]) -> JaggedTensor:
    rows = x.segments
    moves = rows.keep(source(rows.positions, rows.spread_rows(rows.row_lengths)) - rows.positions)
    index = torch.arange(rows.total, device=moves.device) + moves
    return x.with_values(x.unwrap("values").index_select(x.ragged_dim - 1, index))


implement_entries(
    JaggedTensor,
    Entries(
        place=lambda func, x, dim: feature_place(name_of(func), x, dim),
        stored=lambda x: x.unwrap("values"),
        wrap=lambda x, values, gone: x.with_values(values, ragged_dim_after(x, gone, False)),
        ragged=lambda x: x.ragged_dim or None,
        rearrange=_rearrange,
        shown=shown,
    ),
)
implement_composites(JaggedTensor, shown)
implement_margins(JaggedTensor)
implement_norms_of_channels(JaggedTensor, lambda x, dim: dim not in (0, x.ragged_dim), shown)


def _stride_stored(
    x: JaggedTensor, values: Tensor, size: list[int], stride: list[int], skipped: int, rows: tuple[int, int]
) -> JaggedTensor:
    batch, ragged = rows
    if batch != 0 or (batch == ragged) != (x.ragged_dim == 0):
        raise DispatchError(f"as_strided: the rows of {shown(x)} stay at the first dimension, got {size}")
    size[ragged] = values.shape[max(x.ragged_dim - 1, 0)]
    first = min(ragged, 1)
    view = values.as_strided(size[first:], stride[first:], values.storage_offset() + skipped)
    return x.with_values(view, ragged)


implement_strided(JaggedTensor, shown, lambda x: (max(x.ragged_dim - 1, 0),), _stride_stored)
