"""Ops along a dimension: extrema, products, norms, softmax, cumulative ops, sorting.

Along a feature they run on the values. Along the rows or the batch they run on the padded table, filled with what
changes no result; one table says what that is for each op, and whether the result is again ragged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.reductions import Dims, dims_of, outer_dims, ragged_dim_after
from subclasses.ragged.rows import shown

Fill = Callable[[torch.dtype], float | int | bool]

# ---- what changes no result ------------------------------------------------------------------------------------


def lowest(dtype: torch.dtype) -> float | int | bool:
    """The least value of a dtype."""
    if dtype == torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> float | int | bool:
    """The greatest value of a dtype."""
    if dtype == torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def last(dtype: torch.dtype) -> float | int | bool:
    """What sorts behind every value of a dtype, if ties keep their order: NaN where there is one."""
    return math.nan if dtype.is_floating_point else highest(dtype)


def constant(value: float | int | bool) -> Fill:
    """The same for each dtype."""
    return lambda dtype: value


# Ops that reduce dimensions: what the padding holds meanwhile, and whether a result needs an entry at all.
REDUCTIONS: dict[Any, tuple[Fill, bool]] = {
    torch.amax: (lowest, True),
    torch.amin: (highest, True),
    torch.argmax: (lowest, True),
    torch.argmin: (highest, True),
    torch.prod: (constant(1), False),
    torch.all: (constant(True), False),
    torch.any: (constant(False), False),
    torch.count_nonzero: (constant(0), False),
    torch.nansum: (constant(0), False),
    torch.nanmean: (constant(math.nan), False),
    torch.logsumexp: (lowest, False),
}
if hasattr(torch, "hash_tensor"):  # new in 2.10
    REDUCTIONS[torch.hash_tensor] = (constant(0), False)

# Ops that keep the size.
ALONG: dict[Any, Fill] = {
    torch.softmax: lowest,
    torch.log_softmax: lowest,
    torch.cumsum: constant(0),
    torch.cumprod: constant(1),
    torch.logcumsumexp: lowest,
    torch.cummax: lowest,
    torch.cummin: highest,
}

# ---- reductions ------------------------------------------------------------------------------------------------


@JaggedTensor.implements(*REDUCTIONS)
def _(func: Any, input: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    function = getattr(torch, func.__name__)  # Tensor.amax and torch.amax are one op
    fill, needs_entry = REDUCTIONS[function]
    if dim is None and function in (torch.argmax, torch.argmin):
        raise DispatchError(
            f"{func.__name__}: an index into all entries of {shown(input)} has no meaning; give dim"
        )
    return reduce(function, input, dim, keepdim, fill, needs_entry, **kwargs)


def reduce(
    func: Any, x: JaggedTensor, dim: Any, keepdim: bool, fill: Fill, needs_entry: bool, **kwargs: Any
) -> Any:
    """A reduction on values, or on a padded table where the padding changes no result."""
    dims = dims_of(func.__name__, x, dim)
    kwargs |= {} if func is torch.count_nonzero else {"keepdim": keepdim}
    if dims.rows_stay:
        result = func(x.unwrap("values"), _as_given(dim, dims.features), **kwargs)
        return _each(result, lambda part: x.with_values(part, ragged_dim_after(x, dims.features, keepdim)))
    if needs_entry:
        _check_entries(func, x, dims)
    dense = x.to_dense(fill(x.dtype))
    if dim is None and not keepdim and func not in (torch.amax, torch.amin, torch.logsumexp):
        return func(dense)
    return func(dense, _as_given(dim, outer_dims(x, dims)), **kwargs)


def _as_given(dim: Any, dims: Any) -> Any:
    """One dimension where one was given: some ops take no list."""
    return dims[0] if isinstance(dim, int) else tuple(dims)


def _check_entries(func: Any, x: JaggedTensor, dims: Dims) -> None:
    """Raises where there is no entry to take a result from."""
    if dims.batch and dims.ragged:
        return
    counts = x.row_lengths() if dims.ragged else x.segments.mask().sum(0)
    if torch.compiler.is_compiling() or type(counts) is not Tensor or counts.is_cuda:
        torch.ops.aten._assert_async.msg(
            (counts > 0).all(), f"{func.__name__}: a row of a ragged tensor is empty"
        )
    elif not bool((counts > 0).all()):
        where = (counts == 0).nonzero().squeeze(1).tolist()
        raise IndexError(
            f"{func.__name__}: {shown(x)} has no entries in {'rows' if dims.ragged else 'positions'} {where}"
        )


def _each(result: Any, wrap: Callable[[Tensor], Any]) -> Any:
    """The wrapped result, or a named tuple of wrapped results."""
    if isinstance(result, Tensor):
        return wrap(result)
    return type(result)(tuple(wrap(part) for part in result))


@JaggedTensor.implements(torch.max, torch.min)
def _(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    largest = func.__name__ == "max"
    if "other" in kwargs or (args and isinstance(args[0], Tensor)):
        return (torch.maximum if largest else torch.minimum)(input, *args, **kwargs)
    if not args and not kwargs:
        return torch.amax(input) if largest else torch.amin(input)
    dim = args[0] if args else kwargs["dim"]
    keepdim = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
    function = torch.max if largest else torch.min
    return reduce(function, input, dim, keepdim, lowest if largest else highest, True)


@JaggedTensor.implements(torch.linalg.vector_norm)
def _(func: Any, x: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    def norm(t: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        return torch.linalg.vector_norm(t, ord, dim, keepdim, dtype=dtype)

    return reduce(norm, x, dim, keepdim, constant(math.inf if ord < 0 else 0), ord < 0)


@JaggedTensor.implements(torch.norm)
def _(
    func: Any, input: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Any:
    if p not in ("fro", None) and not isinstance(p, int | float):
        raise DispatchError(f"norm: expected a vector norm of {shown(input)}, got p={p!r}")
    ord = 2 if p in ("fro", None) else p
    return torch.linalg.vector_norm(input, ord, dim, keepdim, dtype=dtype)


# ---- ops that keep the size ------------------------------------------------------------------------------------


@JaggedTensor.implements(*ALONG)
def _(func: Any, input: Any, dim: int, *args: Any, **kwargs: Any) -> Any:
    function = getattr(torch, func.__name__)
    return run_along(function, input, dim, ALONG[function], *args, **kwargs)


@JaggedTensor.implements(torch.sort, torch.argsort)
def _(func: Any, input: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    function, fill = getattr(torch, func.__name__), lowest if descending else last
    # Stable, so that an entry as low as what stands for none comes before it.
    return run_along(function, input, dim, fill, descending=descending, stable=True)


def run_along(func: Any, x: JaggedTensor, dim: int, fill: Fill, *args: Any, **kwargs: Any) -> Any:
    """An op along one dimension, on values or on a padded table."""
    dims = dims_of(func.__name__, x, dim)
    if dims.rows_stay:
        return _each(func(x.unwrap("values"), *args, dim=dims.features[0], **kwargs), x.with_values)
    dense = x.to_dense(fill(x.dtype))
    return _each(func(dense, *args, dim=outer_dims(x, dims)[0], **kwargs), x.like_dense)
