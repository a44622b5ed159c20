"""Pointwise ops and copies of a ``PaddedTensor``: the rules of both layouts, on its table."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from subclasses.dispatch.aliasing import bump_versions
from subclasses.ragged.elementwise import Operands, implement_copies, implement_equal, implement_pointwise
from subclasses.ragged.padded.rows import aligned, as_wide, check_fits, first_padded, shown
from subclasses.ragged.padded.tensor import PaddedTensor

# ---- what stands beside the table ------------------------------------------------------------------------------


def _beside(op: Any, x: PaddedTensor, a: Tensor) -> Tensor:
    check_fits(op, x, a)
    return as_wide(x, a).padded if isinstance(a, PaddedTensor) else a


def _moved(x: PaddedTensor, padded: Tensor) -> PaddedTensor:
    row_count = None if x.row_count is None else x.row_count.to(padded.device)
    return x.with_lengths(padded, x.lengths.to(padded.device), row_count)


def _write(op: Any, x: PaddedTensor, new: Tensor, non_blocking: bool) -> None:
    x.padded.copy_(new, non_blocking)
    bump_versions([x.padded])


# ---- the rules -------------------------------------------------------------------------------------------------

OPERANDS = Operands(
    first_padded, PaddedTensor.with_padded, _beside, aligned, _moved, _write, lambda *_: None, shown
)
implement_copies(PaddedTensor, OPERANDS)
implement_pointwise(PaddedTensor, OPERANDS)
implement_equal(PaddedTensor, OPERANDS)
