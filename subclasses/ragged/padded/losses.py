"""Losses of a ``PaddedTensor``: the rules of both layouts, on its table."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from subclasses.ragged.families import implement_losses
from subclasses.ragged.layers import Samples, implement_class_losses
from subclasses.ragged.padded.layers import ENTRYWISE
from subclasses.ragged.padded.rows import alongside, first_padded, table_beside
from subclasses.ragged.padded.tensor import PaddedTensor

# ---- losses of classes -----------------------------------------------------------------------------------------


def _cut(x: PaddedTensor, table: Tensor, rows: tuple[int, int]) -> PaddedTensor:
    return x.with_padded(table, rows[1], rows[0]).like_dense(table)


implement_class_losses(PaddedTensor, ENTRYWISE, Samples(PaddedTensor.to_dense, _cut, alongside))

# ---- losses of two operands ------------------------------------------------------------------------------------


def _beside(func: Any, x: PaddedTensor, t: Any) -> Any:
    """Ones are in the domain of every loss: no derivative there is NaN, and none gets through."""
    return table_beside(func, x, t, 1)


def _batch_size(x: PaddedTensor) -> Any:
    """The extent of the first dimension of a batch: its rows, or the entries of merged ones."""
    if x.merged:
        return x.exists.sum()
    return x.shape[x.batch_dim] if x.row_count is None else x.row_count.squeeze(0)


implement_losses(PaddedTensor, first_padded, _beside, PaddedTensor.like_dense, _batch_size)
