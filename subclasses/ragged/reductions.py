"""Reductions count the entries that exist.

A dimension that is reduced is one of three kinds: a feature of an entry, the ragged one (then each row gives a result),
or the batch (then each position gives one, over the rows that reach it).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subclasses.ragged.checks import check_not_recorded
from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.rows import shown

aten = torch.ops.aten

# ---- which dimensions ------------------------------------------------------------------------------------------


class Dims(NamedTuple):
    """The dimensions of a reduction: of the features (in values), and whether batch and ragged ones go."""

    features: tuple[int, ...]
    batch: bool
    ragged: bool

    @property
    def rows_stay(self) -> bool:
        """Whether the result is ragged as its argument."""
        return not (self.batch or self.ragged)


def dims_of(func: Any, x: JaggedTensor, dim: int | Sequence[int] | None) -> Dims:
    """Sorts the dimensions of a reduction; none given means all.

    Raises:
        IndexError: there is no such dimension, or it is named twice.
    """
    given = (
        [dim] if isinstance(dim, int) else list(range(x.dim())) if dim is None or not len(dim) else list(dim)
    )
    outer = [d % x.dim() for d in given if -x.dim() <= d < x.dim()]
    if len(set(outer)) < len(given):
        raise IndexError(f"{func}: expected distinct dimensions of {shown(x)}, got {given}")
    first = min(x.ragged_dim, 1)
    features = tuple(d - first for d in outer if d not in (0, x.ragged_dim))
    return Dims(features, 0 in outer, x.ragged_dim in outer)


def ragged_dim_after(x: JaggedTensor, features: Sequence[int], keepdim: bool) -> int:
    """Where the ragged dimension is once features are gone."""
    return x.ragged_dim if keepdim else x.ragged_dim - sum(p < x.ragged_dim - 1 for p in features)


# ---- sums ------------------------------------------------------------------------------------------------------


def sum_values(x: JaggedTensor, values: Tensor, dims: Dims, keepdim: bool, dtype: Any = None) -> Tensor:
    """The sum over existing entries of a tensor shaped as the values of ``x``; dense, or the values of the result."""
    if dims.features:
        values = values.sum(dims.features, keepdim=True, dtype=dtype)
    elif dtype is not None:
        values = values.to(dtype)
    if dims.rows_stay:
        return values if keepdim else values.squeeze(dims.features)
    place = max(x.ragged_dim - 1, 0)
    entries, rows = values.movedim(place, 0), x.segments
    if dims.batch and dims.ragged:
        result = rows.keep(entries).sum(0, keepdim=True)
        result = result.unsqueeze(0) if x.ragged_dim else result
    elif dims.ragged:
        result = rows.sum_rows(entries).unsqueeze(1)
    else:
        result = rows.sum_positions(entries).unsqueeze(0)
    result = result.movedim(1, x.ragged_dim) if x.ragged_dim > 1 else result
    return result if keepdim else result.squeeze(outer_dims(x, dims))


def outer_dims(x: JaggedTensor, dims: Dims) -> list[int]:
    """The outer dimensions that are reduced."""
    first = min(x.ragged_dim, 1)
    return sorted({*[p + first for p in dims.features], *[0] * dims.batch, *[x.ragged_dim] * dims.ragged})


@JaggedTensor.implements(torch.sum)
def _(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return _sum(func, input, input.unwrap("values"), dim, keepdim, dtype)


@JaggedTensor.implements(aten.sum.dim_IntList)
def _(op: Any, x: JaggedTensor, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Below autograd: what brings a cotangent down to the size of a dense operand that broadcast."""
    check_not_recorded(op, x)
    return _sum(op, x, x.values, dim, keepdim, dtype)


@JaggedTensor.implements(aten.sum.default)
def _(op: Any, x: JaggedTensor, *, dtype: Any = None) -> Any:
    check_not_recorded(op, x)
    return _sum(op, x, x.values, None, False, dtype)


def _sum(func: Any, x: JaggedTensor, values: Tensor, dim: Any, keepdim: bool, dtype: Any) -> Any:
    dims = dims_of(func, x, dim)
    result = sum_values(x, values, dims, keepdim, dtype)
    return x.with_values(result, ragged_dim_after(x, dims.features, keepdim)) if dims.rows_stay else result


# ---- what is counted -------------------------------------------------------------------------------------------


def count(func: Any, x: JaggedTensor, dim: Any, keepdim: bool) -> Any:
    """How many elements each result of a reduction is made of; a number, or a tensor that divides it."""
    dims = dims_of(func, x, dim)
    of_entry = math.prod(x.values.size(p) for p in dims.features)
    if dims.rows_stay:
        return of_entry
    if dims.batch and dims.ragged:
        return x.segments.number() * of_entry
    rows = x.segments
    numbers = rows.row_lengths if dims.ragged else rows.mask().sum(0)
    # Beside the dimension of the counts, ones.
    stays = 0 if dims.ragged else x.ragged_dim
    gone = set() if keepdim else set(outer_dims(x, dims))
    shape = [numbers.shape[0] if d == stays else 1 for d in range(x.dim()) if d not in gone]
    return (numbers * of_entry).view(shape)
