"""Pointwise ops and copies of a ``JaggedTensor``: the rules of both layouts, on its values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from subclasses.ragged.elementwise import Operands, implement_copies, implement_equal, implement_pointwise
from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.rows import (
    entries_of,
    first_ragged,
    is_entrywise,
    matched_values,
    relaid,
    same_rows,
    shown,
    spread,
)
from subclasses.ragged.sharing import check_writable, write_values

# ---- what stands beside the values -----------------------------------------------------------------------------


def _beside(op: Any, x: JaggedTensor, a: Tensor) -> Tensor:
    return matched_values(op, x, a) if isinstance(a, JaggedTensor) else spread(op, x, a)


def _aligned(func: Any, x: JaggedTensor, a: Tensor) -> Tensor:
    if isinstance(a, JaggedTensor):
        lie_alike = (x.lengths is None and a.lengths is None) or same_rows(x, a)
        return a if lie_alike and a.max_length == x.max_length else relaid(func, x, a)
    return entries_of(x, a) if a.requires_grad and is_entrywise(x, a) else a


def _moved(x: JaggedTensor, values: Tensor) -> JaggedTensor:
    return type(x)(
        values,
        x.offsets.to(values.device),
        lengths=None if x.lengths is None else x.lengths.to(values.device),
        ragged_dim=x.ragged_dim,
        max_length=x.max_length,
    )


# ---- the rules -------------------------------------------------------------------------------------------------

OPERANDS = Operands(
    first_ragged, JaggedTensor.with_values, _beside, _aligned, _moved, write_values, check_writable, shown
)
implement_copies(JaggedTensor, OPERANDS)
implement_pointwise(JaggedTensor, OPERANDS)
implement_equal(JaggedTensor, OPERANDS)
