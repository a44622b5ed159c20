"""Runs reductions on the stored tensor along features, else on a table with a fill where there is no entry.

A reduction along the ragged dimension has a result for each row. A reduction along the batch dimension has a result for
each position, over the rows that reach it. A fill is a value that changes no result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.base import outer_dims, rows_stay, shown, without

Fill = Callable[[torch.dtype], float | int | bool]

# ---- fills -------------------------------------------------------------------------------------------------------


def lowest(dtype: torch.dtype) -> float | int | bool:
    """The least value of a dtype."""
    if dtype == torch.bool:
        return False
    return -math.inf if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> float | int | bool:
    """The greatest value of a dtype."""
    if dtype == torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def last(dtype: torch.dtype) -> float | int | bool:
    """Returns a value that a stable sort puts after all values of a dtype: NaN if the dtype has it."""
    return math.nan if dtype.is_floating_point else highest(dtype)


def constant(value: float | int | bool) -> Fill:
    """The same value for each dtype."""
    return lambda dtype: value


# Ops whose results number entries, or put them in another order.
NUMBERED = frozenset("argmax argmin argsort cummax cummin kthvalue max median min nanmedian sort".split())

# ---- on stored tensors and on tables ---------------------------------------------------------------------------


def reduce(func: Any, x: Any, dim: Any, keepdim: bool, fill: Fill, needs_entry: bool, **kwargs: Any) -> Any:
    """Runs a reduction; ``func`` gets the stored tensor, or a table with ``fill`` where there is no entry."""
    within = within_entries(func, x, dim, keepdim, **kwargs)
    if within is not None:
        return within
    dims = outer_dims(func, x, dim)
    if func.__name__ in NUMBERED:
        x.check_numbered(func, dims)
    if needs_entry:
        x.check_has_entries(func, dims)
    if dim is None and not keepdim:  # a full reduction needs no table
        stored = x.clean(fill(x.dtype))
        listed = func in (torch.amax, torch.amin, torch.logsumexp)
        return func(stored, tuple(range(stored.dim()))) if listed else func(stored)
    dense = x.to_dense(fill(x.dtype))
    result = func(dense, _as_given(dim, dims), **kwargs, **_keepdim_of(func, keepdim))
    return per_row(x, dims, keepdim, result)


def within_entries(func: Any, x: Any, dim: Any, keepdim: bool, **kwargs: Any) -> Any:
    """Runs a reduction within each entry; returns None if rows or the batch are reduced."""
    dims = outer_dims(func, x, dim)
    if not rows_stay(x, dims):
        return None
    stored_dims = [x.stored_dim(d) for d in dims]
    result = func(x.unwrap_stored(), _as_given(dim, stored_dims), **kwargs, **_keepdim_of(func, keepdim))
    return each(result, lambda part: without(x, part, () if keepdim else dims))


def run_along(func: Any, x: Any, dim: int, fill: Fill, *args: Any, **kwargs: Any) -> Any:
    """Runs an op along one dimension that keeps the size."""
    dims = outer_dims(func, x, dim)
    if rows_stay(x, dims):
        stored_dim = x.stored_dim(dims[0])
        return each(func(x.unwrap_stored(), *args, dim=stored_dim, **kwargs), x.with_stored)
    if func.__name__ in NUMBERED:
        x.check_numbered(func, dims)
    return each(func(x.to_dense(fill(x.dtype)), *args, dim=dims[0], **kwargs), x.like_dense)


def count(func: Any, x: Any, dim: Any, keepdim: bool) -> Any:
    """Returns how many elements each result of a reduction has: an int, or a tensor that broadcasts."""
    dims = outer_dims(func, x, dim)
    of_entry = math.prod(x.shape[d] for d in dims if d not in x.row_dims)
    return of_entry if rows_stay(x, dims) else x.count_entries(dims, keepdim) * of_entry


def per_row(x: Any, dims: Sequence[int], keepdim: bool, result: Any) -> Any:
    """Returns the result of a reduction; if it has rows, rows beyond the batch do not exist."""
    if x.ragged_dim not in dims or x.batch_dim in dims:
        return result
    batch_dim = x.batch_dim - (0 if keepdim else sum(d < x.batch_dim for d in dims))
    return each(result, lambda part: x.per_row(part, batch_dim))


def without_out(func: Any, x: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the options without ``out=None``.

    Raises:
        DispatchError: ``out`` is a tensor, whose size would be the size of the stored tensor.
    """
    if kwargs.get("out") is not None:
        raise DispatchError(
            f"{func.__name__}: a result of {shown(x)} is a new one, and not written to an out=",
            code="argument-refused",
        )
    return {k: v for k, v in kwargs.items() if k != "out"}


def each(result: Any, wrap: Callable[[Tensor], Any]) -> Any:
    """Wraps a result, or each result of a named tuple."""
    if isinstance(result, Tensor):
        return wrap(result)
    return type(result)(tuple(wrap(part) for part in result))


def _as_given(dim: Any, dims: Sequence[int]) -> Any:
    """Returns one dimension if one was given, since some ops take no list."""
    return dims[0] if isinstance(dim, int) else tuple(dims)


def _keepdim_of(func: Any, keepdim: bool) -> dict[str, bool]:
    """Returns ``keepdim`` for an op that has it."""
    return {} if func is torch.count_nonzero else {"keepdim": keepdim}
