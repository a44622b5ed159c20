"""Reductions, and ops along a dimension: what does not exist is filled with what changes no result.

The tables say what that is for each op; they are those of the jagged layout. Along the dimensions of an entry an op
runs on the table as it is, and what it makes of the padding is padding again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.along import ALONG, REDUCTIONS, Fill, constant, highest, last, lowest
from subclasses.ragged.padded.rows import check_numbered, entry_per_row, outer_dims, rows_stay, shown, without
from subclasses.ragged.padded.tensor import PaddedTensor
from subclasses.ragged.segments import sum_dtype

aten = torch.ops.aten

# Ops whose results number entries, or put them in another order.
NUMBERED = (
    torch.argmax,
    torch.argmin,
    torch.max,
    torch.min,
    torch.sort,
    torch.argsort,
    torch.cummax,
    torch.cummin,
)

# ---- sums and means --------------------------------------------------------------------------------------------


@PaddedTensor.implements(torch.sum)
def _(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    dims = outer_dims(func, input, dim)
    total = _sum(input, input.unwrap("padded"), dims, keepdim, dtype)
    return entry_per_row(input, dims, keepdim, total)


@PaddedTensor.implements(aten.sum.dim_IntList)
def _(op: Any, x: PaddedTensor, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Below autograd: what brings a cotangent down to the size of a dense operand that broadcast."""
    return _sum(x, x.padded, outer_dims(op, x, dim), keepdim, dtype)


@PaddedTensor.implements(aten.sum.default)
def _(op: Any, x: PaddedTensor, *, dtype: Any = None) -> Any:
    return _sum(x, x.padded, outer_dims(op, x, None), False, dtype)


def _sum(x: PaddedTensor, padded: Tensor, dims: tuple[int, ...], keepdim: bool, dtype: Any) -> Any:
    if rows_stay(x, dims):
        return without(x, padded.sum(dims, keepdim, dtype=dtype), () if keepdim else dims)
    return x.kept(padded).sum(dims, keepdim, dtype=dtype)


@PaddedTensor.implements(torch.mean)
def _(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if not (input.is_floating_point() or input.is_complex() or dtype is not None):
        raise RuntimeError(f"mean: expected a floating point or complex dtype, got {input.dtype}; give dtype")
    # Half precision is summed in float32: the sum may be beyond its range where the mean is not.
    total = input.sum(dim, keepdim, dtype=dtype or sum_dtype(input.dtype))
    mean = total / count(input, outer_dims(func, input, dim), keepdim)
    return mean.to(dtype or input.dtype)


def count(x: PaddedTensor, dims: tuple[int, ...], keepdim: bool) -> Any:
    """How many elements each result of a reduction is made of; a number, or a tensor that divides it."""
    of_entry = math.prod(x.shape[d] for d in dims if d not in (x.ragged_dim, x.batch_dim))
    if rows_stay(x, dims):
        return of_entry
    return x.exists.sum(dims, keepdim) * of_entry


@PaddedTensor.implements(torch.var, torch.std)
def _(
    func: Any,
    input: Any,
    dim: Any = None,
    unbiased: Any = None,
    keepdim: bool = False,
    *,
    correction: Any = 1,
) -> Any:
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if unbiased is not None:
        correction = int(unbiased)
    dims = outer_dims(func, input, dim)
    if rows_stay(input, dims):
        padded = func(input.unwrap("padded"), dims, correction=correction, keepdim=keepdim)
        return without(input, padded, () if keepdim else dims)
    if sum_dtype(input.dtype) != input.dtype:
        wide = func(input.to(sum_dtype(input.dtype)), dim, correction=correction, keepdim=keepdim)
        return wide.to(input.dtype)
    off = input - input.mean(dim, keepdim=True)
    squares = (off * off.conj()).real if off.is_complex() else off * off
    var = squares.sum(dim, keepdim=keepdim) / (count(input, dims, keepdim) - correction).clamp(min=0)
    return var if func.__name__ == "var" else var.sqrt()


@PaddedTensor.implements(torch.var_mean, torch.std_mean)
def _(
    func: Any,
    input: Any,
    dim: Any = None,
    unbiased: Any = None,
    keepdim: bool = False,
    *,
    correction: Any = 1,
) -> Any:
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if unbiased is not None:
        correction = int(unbiased)
    spread = torch.var if func.__name__ == "var_mean" else torch.std
    return spread(input, dim, correction=correction, keepdim=keepdim), input.mean(dim, keepdim)


# ---- by the table ----------------------------------------------------------------------------------------------


@PaddedTensor.implements(*REDUCTIONS)
def _(func: Any, input: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    function = getattr(torch, func.__name__)  # Tensor.amax and torch.amax are one op
    if dim is None and function in (torch.argmax, torch.argmin):
        raise DispatchError(
            f"{func.__name__}: an index into all entries of {shown(input)} has no meaning; give dim"
        )
    return reduce(function, input, dim, keepdim, *REDUCTIONS[function], **kwargs)


def reduce(
    func: Any, x: PaddedTensor, dim: Any, keepdim: bool, fill: Fill, needs_entry: bool, **kwargs: Any
) -> Any:
    """A reduction on a table where the padding changes no result."""
    dims = outer_dims(func, x, dim)
    given = dims[0] if isinstance(dim, int) else dims  # some ops take no list
    kwargs |= {} if func is torch.count_nonzero else {"keepdim": keepdim}
    if rows_stay(x, dims):
        result = func(x.unwrap("padded"), given, **kwargs)
        return _each(result, lambda part: without(x, part, () if keepdim else dims))
    if func in NUMBERED:
        check_numbered(func, x, dims)
    if needs_entry:
        _check_entries(func, x, dims)
    dense = x.to_dense(fill(x.dtype))
    if dim is None and not keepdim and func not in (torch.amax, torch.amin, torch.logsumexp):
        return func(dense)
    return entry_per_row(x, dims, keepdim, func(dense, given, **kwargs))


def _check_entries(func: Any, x: PaddedTensor, dims: tuple[int, ...]) -> None:
    """Raises where there is no entry to take a result from; nothing waits for a GPU."""
    found = x.exists.sum(dims) > 0
    if x.row_count is not None and x.ragged_dim in dims and x.batch_dim not in dims:
        found = x.per_row(found, x.batch_dim - sum(d < x.batch_dim for d in dims)).to_dense(fill=True)  # type: ignore[call-arg]
    message = f"{func.__name__}: a row or position of {shown(x)} has no entries"
    torch.ops.aten._assert_async.msg(found.all(), message)


def _each(result: Any, wrap: Callable[[Tensor], Any]) -> Any:
    """The wrapped result, or a named tuple of wrapped results."""
    if isinstance(result, Tensor):
        return wrap(result)
    return type(result)(tuple(wrap(part) for part in result))


@PaddedTensor.implements(torch.max, torch.min)
def _(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    largest = func.__name__ == "max"
    if "other" in kwargs or (args and isinstance(args[0], Tensor)):
        return (torch.maximum if largest else torch.minimum)(input, *args, **kwargs)
    if not args and not kwargs:
        return torch.amax(input) if largest else torch.amin(input)
    dim = args[0] if args else kwargs["dim"]
    keepdim = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
    return reduce(getattr(torch, func.__name__), input, dim, keepdim, lowest if largest else highest, True)


@PaddedTensor.implements(torch.linalg.vector_norm)
def _(func: Any, x: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    def norm(t: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        return torch.linalg.vector_norm(t, ord, dim, keepdim, dtype=dtype)

    return reduce(norm, x, dim, keepdim, constant(math.inf if ord < 0 else 0), ord < 0)


@PaddedTensor.implements(torch.equal)
def _(func: Any, input: Any, other: Any) -> Any:
    """Whether the rows are; where shapes or lengths differ they are not."""
    for t in (input, other):
        if not isinstance(t, PaddedTensor):
            raise DispatchError(f"{func.__name__}: expected two padded tensors, got {shown(t)}")
    if (input.shape, input.ragged_dim, input.batch_dim) != (other.shape, other.ragged_dim, other.batch_dim):
        return False
    return torch.equal(input.lengths, other.lengths) and bool((input == other).all())


# ---- ops that keep the size ------------------------------------------------------------------------------------


@PaddedTensor.implements(*ALONG)
def _(func: Any, input: Any, dim: int, *args: Any, **kwargs: Any) -> Any:
    function = getattr(torch, func.__name__)
    return _run_along(function, input, dim, ALONG[function], *args, **kwargs)


@PaddedTensor.implements(torch.sort, torch.argsort)
def _(func: Any, input: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    function, fill = getattr(torch, func.__name__), lowest if descending else last
    # Stable, so that an entry as low as what stands for none comes before it.
    return _run_along(function, input, dim, fill, descending=descending, stable=True)


def _run_along(func: Any, x: PaddedTensor, dim: int, fill: Fill, *args: Any, **kwargs: Any) -> Any:
    """An op along one dimension; where it mixes entries the padding is filled, and its cotangent cut off."""
    (dim,) = outer_dims(func, x, dim)
    if rows_stay(x, [dim]):
        return _each(func(x.unwrap("padded"), *args, dim=dim, **kwargs), x.with_padded)
    if func in NUMBERED:
        check_numbered(func, x, [dim])
    return _each(func(x.to_dense(fill(x.dtype)), *args, dim=dim, **kwargs), x.like_dense)
