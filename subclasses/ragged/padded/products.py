"""What works within entries of a table, and products of them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from subclasses.ragged.einsum import Parts, implement_einsum
from subclasses.ragged.entries import Entries, implement_composites, implement_entries
from subclasses.ragged.margins import implement_margins
from subclasses.ragged.norms import implement_norms_of_channels
from subclasses.ragged.padded.cutting import other_rows, take_places
from subclasses.ragged.padded.rows import alongside, rows_stay, shown, without
from subclasses.ragged.padded.tensor import PaddedTensor
from subclasses.ragged.padded.views import entry_dim
from subclasses.ragged.strided import implement_strided


def _from_table(x: PaddedTensor, table: Tensor, place: tuple[int, int]) -> PaddedTensor:
    y = x.with_padded(table, place[1], place[0])
    return y.with_padded(y.kept(table))


implement_einsum(
    PaddedTensor,
    Parts(
        places=lambda x: (x.batch_dim, x.ragged_dim),
        align=functools.partial(alongside, "einsum"),
        entries=lambda x: (x.to_dense(), []),
        with_entries=_from_table,
        table=lambda x: x.to_dense(),
        from_table=_from_table,
        per_row=lambda x, table, dim: x.per_row(table, dim),
        shown=shown,
    ),
)


def _rearrange(x: PaddedTensor, source: Callable[[Tensor, Tensor], Tensor]) -> PaddedTensor:
    places = torch.arange(x.width, device=x.lengths.device).expand(x.lengths.shape[0], -1)
    return other_rows(x, take_places(x, source(places, x.counts.unsqueeze(1))), x.lengths)


implement_entries(
    PaddedTensor,
    Entries(
        place=entry_dim,
        stored=lambda x: x.unwrap("padded"),
        wrap=without,
        ragged=lambda x: None if x.merged else x.ragged_dim,
        rearrange=_rearrange,
        shown=shown,
    ),
)
implement_composites(PaddedTensor, shown)
implement_margins(PaddedTensor)
implement_norms_of_channels(PaddedTensor, lambda x, dim: rows_stay(x, [dim]), shown)


def _stride_stored(
    x: PaddedTensor, padded: Tensor, size: list[int], stride: list[int], skipped: int, rows: tuple[int, int]
) -> PaddedTensor:
    view = padded.as_strided(size, stride, padded.storage_offset() + skipped)
    return x.with_padded(view, rows[1], rows[0])


implement_strided(PaddedTensor, shown, lambda x: (x.batch_dim, x.ragged_dim), _stride_stored)
