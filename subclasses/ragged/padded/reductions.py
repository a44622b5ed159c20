"""Reductions, and ops along a dimension: what does not exist is filled with what changes no result.

The rules are those of both layouts (families.py), and so are the tables that say what that is for each op. Along the
dimensions of an entry an op runs on the table as it is, and what it makes of the padding is padding again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from subclasses.ragged.checks import check_not_recorded
from subclasses.ragged.families import (
    Fill,
    Ways,
    each,
    implement_along,
    implement_means,
    implement_reductions,
    keepdim_of,
)
from subclasses.ragged.ordered import implement_ordered
from subclasses.ragged.padded.rows import check_numbered, entry_per_row, outer_dims, rows_stay, shown, without
from subclasses.ragged.padded.tensor import PaddedTensor

aten = torch.ops.aten

# Ops whose results number entries, or put them in another order.
NUMBERED = frozenset("argmax argmin argsort cummax cummin kthvalue max median min nanmedian sort".split())

# ---- sums ------------------------------------------------------------------------------------------------------


@PaddedTensor.implements(torch.sum)
def _(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    dims = outer_dims(func, input, dim)
    total = _sum(input, input.unwrap("padded"), dims, keepdim, dtype)
    return entry_per_row(input, dims, keepdim, total)


@PaddedTensor.implements(aten.sum.dim_IntList)
def _(op: Any, x: PaddedTensor, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Below autograd: what brings a cotangent down to the size of a dense operand that broadcast."""
    check_not_recorded(op, x)
    return _sum(x, x.padded, outer_dims(op, x, dim), keepdim, dtype)


@PaddedTensor.implements(aten.sum.default)
def _(op: Any, x: PaddedTensor, *, dtype: Any = None) -> Any:
    check_not_recorded(op, x)
    return _sum(x, x.padded, outer_dims(op, x, None), False, dtype)


def _sum(x: PaddedTensor, padded: Tensor, dims: tuple[int, ...], keepdim: bool, dtype: Any) -> Any:
    if rows_stay(x, dims):
        return without(x, padded.sum(dims, keepdim, dtype=dtype), () if keepdim else dims)
    return x.kept(padded).sum(dims, keepdim, dtype=dtype)


def count(func: Any, x: PaddedTensor, dim: Any, keepdim: bool) -> Any:
    """How many elements each result of a reduction is made of; a number, or a tensor that divides it."""
    dims = outer_dims(func, x, dim)
    of_entry = math.prod(x.shape[d] for d in dims if d not in (x.ragged_dim, x.batch_dim))
    if rows_stay(x, dims):
        return of_entry
    return x.exists.sum(dims, keepdim) * of_entry


# ---- by the table ----------------------------------------------------------------------------------------------


def of_features(func: Any, x: PaddedTensor, dim: Any, keepdim: bool, **kwargs: Any) -> Any:
    """A reduction within each entry; None where rows or the batch are reduced."""
    dims = outer_dims(func, x, dim)
    if not rows_stay(x, dims):
        return None
    given = dims[0] if isinstance(dim, int) else dims  # some ops take no list
    result = func(x.unwrap("padded"), given, **kwargs, **keepdim_of(func, keepdim))
    return each(result, lambda part: without(x, part, () if keepdim else dims))


def reduce(
    func: Any, x: PaddedTensor, dim: Any, keepdim: bool, fill: Fill, needs_entry: bool, **kwargs: Any
) -> Any:
    """A reduction on a table where the padding changes no result."""
    within = of_features(func, x, dim, keepdim, **kwargs)
    if within is not None:
        return within
    dims = outer_dims(func, x, dim)
    given = dims[0] if isinstance(dim, int) else dims
    if func.__name__ in NUMBERED:
        check_numbered(func, x, dims)
    if needs_entry:
        _check_entries(func, x, dims)
    dense = x.to_dense(fill(x.dtype))
    if dim is None and not keepdim and func not in (torch.amax, torch.amin, torch.logsumexp):
        return func(dense)
    result = func(dense, given, **kwargs, **keepdim_of(func, keepdim))
    return entry_per_row(x, dims, keepdim, result)


def _check_entries(func: Any, x: PaddedTensor, dims: tuple[int, ...]) -> None:
    """Raises where there is no entry to take a result from; nothing waits for a GPU."""
    found = x.exists.sum(dims) > 0
    found = entry_per_row(x, dims, False, found)
    if isinstance(found, PaddedTensor):  # rows that the batch has not need none
        found = found.to_dense(fill=True)
    message = f"{func.__name__}: a row or position of {shown(x)} has no entries"
    torch.ops.aten._assert_async.msg(found.all(), message)


# ---- ops that keep the size ------------------------------------------------------------------------------------


def run_along(func: Any, x: PaddedTensor, dim: int, fill: Fill, *args: Any, **kwargs: Any) -> Any:
    """An op along one dimension; where it mixes entries the padding is filled, and its cotangent cut off."""
    (dim,) = outer_dims(func, x, dim)
    if rows_stay(x, [dim]):
        return each(func(x.unwrap("padded"), *args, dim=dim, **kwargs), x.with_padded)
    if func.__name__ in NUMBERED:
        check_numbered(func, x, [dim])
    return each(func(x.to_dense(fill(x.dtype)), *args, dim=dim, **kwargs), x.like_dense)


# ---- the rules -------------------------------------------------------------------------------------------------

WAYS = Ways(reduce, run_along, of_features, count, shown)
implement_means(PaddedTensor, WAYS)
implement_reductions(PaddedTensor, WAYS)
implement_along(PaddedTensor, WAYS)
implement_ordered(PaddedTensor, WAYS)
