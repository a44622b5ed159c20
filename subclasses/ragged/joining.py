"""``cat`` and ``stack``: along a feature of the entries, along the rows, or of the rows one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.rows import matched_values, shown, spread
from subclasses.ragged.views import feature_place, place_of

aten = torch.ops.aten

# ---- below autograd: along a feature ---------------------------------------------------------------------------


@JaggedTensor.implements(aten.cat.default)
def _(op: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    x = next(t for t in tensors if isinstance(t, JaggedTensor))
    place = feature_place(op, x, dim)
    return x.with_values(op([_values_beside(op, x, t, place) for t in tensors], place))


@JaggedTensor.implements(aten.stack.default)
def _(op: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    x = next(t for t in tensors if isinstance(t, JaggedTensor))
    place = place_of(op, x, dim, extra=1)
    if x.ragged_dim == 0 and place == 0:
        raise DispatchError(f"{op}: merged dimensions stay first; unmerge them by x.unflatten(0, (B, T))")
    values = op([_values_beside(op, x, t, None) for t in tensors], place)
    return x.with_values(values, x.ragged_dim + (place < x.ragged_dim))


def _values_beside(func: Any, x: JaggedTensor, t: Tensor, place: int | None) -> Tensor:
    """The values of one operand; a dense one (zeros, where a derivative is missing) is brought to the entries."""
    if isinstance(t, JaggedTensor):
        return matched_values(func, x, t)
    if t.dim() != x.dim():
        raise DispatchError(
            f"{func}: expected ragged tensors or dense ones of as many dimensions, got {shown(t)}"
        )
    values = spread(func, x, t)
    size = [values.shape[p] if p == place else n for p, n in enumerate(x.values.shape)]
    return values.expand(size)
