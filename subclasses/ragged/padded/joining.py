"""``cat`` and ``stack`` along the dimensions of the entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.padded.rows import check_fits, first_padded, shown
from subclasses.ragged.padded.tensor import PaddedTensor
from subclasses.ragged.padded.views import entry_dim

aten = torch.ops.aten

# ---- above autograd --------------------------------------------------------------------------------------------


@PaddedTensor.implements(torch.cat, torch.stack)
def _(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """A dense operand becomes a ragged one where autograd sees it: its cotangent comes back ragged."""
    x = first_padded(tensors)
    settled = [
        t if isinstance(t, PaddedTensor) else x.like_dense(_checked(func.__name__, x, t)) for t in tensors
    ]
    return PaddedTensor.unruled(func, settled, dim)


def _checked(func: Any, x: PaddedTensor, t: Tensor) -> Tensor:
    """An operand that has the rows of ``x``, in a table as wide."""
    check_fits(func, x, t)
    if t.dim() != x.dim() or any(t.shape[d] != x.shape[d] for d in (x.ragged_dim, x.batch_dim)):
        raise DispatchError(
            f"{func}: expected tables of the same rows and width as {shown(x)}, got {shown(t)}"
        )
    return t


# ---- below autograd --------------------------------------------------------------------------------------------


@PaddedTensor.implements(aten.cat.default)
def _(op: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    x = first_padded(tensors)
    return x.with_padded(op(_tables(op, x, tensors), entry_dim(op, x, dim)))


@PaddedTensor.implements(aten.stack.default)
def _(op: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    x = first_padded(tensors)
    padded = op(_tables(op, x, tensors), dim)
    place = dim % padded.dim()
    return x.with_padded(padded, *(d + (d >= place) for d in (x.ragged_dim, x.batch_dim)))


def _tables(op: Any, x: PaddedTensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tables of the operands; a dense one is a derivative that is zero."""
    return [t.padded if isinstance(t, PaddedTensor) else t for t in (_checked(op, x, t) for t in tensors)]
