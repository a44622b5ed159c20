"""Losses of a ``JaggedTensor``: the rules of both layouts, on its values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from subclasses.ragged.families import implement_losses
from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.layers import Samples, implement_class_losses
from subclasses.ragged.linear import ENTRYWISE
from subclasses.ragged.rows import alongside, first_ragged, values_beside

# ---- losses of classes -----------------------------------------------------------------------------------------


def _clean(x: JaggedTensor, fill: float) -> Tensor:
    return x.leading(x.kept(x.unwrap("values"), fill))


implement_class_losses(
    JaggedTensor, ENTRYWISE, Samples(_clean, lambda x, table, rows: x.with_entries(table, rows[1]), alongside)
)

# ---- losses of two operands ------------------------------------------------------------------------------------


def _batch_size(x: JaggedTensor) -> Any:
    """The extent of the first dimension: the rows, or the entries of merged ones."""
    return x.offsets.shape[0] - 1 if x.ragged_dim else x.segments.number()


def _beside_values(func: Any, x: JaggedTensor, a: Any) -> Any:
    """As `values_beside`, with ones in holes, which are in the domain of every loss."""
    beside = values_beside(func, x, a)
    return x.kept(beside, 1) if isinstance(a, JaggedTensor) else beside


implement_losses(JaggedTensor, first_ragged, _beside_values, lambda x, loss: x.with_values(loss), _batch_size)
