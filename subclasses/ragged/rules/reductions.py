"""Sums, means, variances, extrema, norms, scans and sorting: they count the entries that exist; see reducing.py."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.base import outer_dims, rows_stay, shown, without
from subclasses.ragged.checks import check_not_recorded
from subclasses.ragged.registry import Rules
from subclasses.ragged.rules.reducing import (
    Fill,
    constant,
    count,
    highest,
    last,
    lowest,
    per_row,
    reduce,
    run_along,
    within_entries,
    without_out,
)
from subclasses.ragged.segments import sum_dtype

RULES = Rules()
aten = torch.ops.aten

# Ops that reduce dimensions: the fill, and whether a result needs an entry.
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

# Ops that keep the size: the fill.
ALONG: dict[Any, Fill] = {
    torch.softmax: lowest,
    torch.log_softmax: lowest,
    torch.cumsum: constant(0),
    torch.cumprod: constant(1),
    torch.logcumsumexp: lowest,
    torch.cummax: lowest,
    torch.cummin: highest,
}

# ---- sums ------------------------------------------------------------------------------------------------------


@RULES.of(torch.sum)
def _sum_above(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Sums above autograd, since autograd's formula would expand to the outer size."""
    dims = outer_dims(func, input, dim)
    return per_row(input, dims, keepdim, _sum(input, input.unwrap_stored(), dims, keepdim, dtype))


@RULES.of(aten.sum.dim_IntList)
def _sum_below(op: Any, x: Any, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Sums a cotangent to the size of a dense operand that was broadcast; below autograd."""
    check_not_recorded(op, x)
    return _sum(x, x.stored, outer_dims(op, x, dim), keepdim, dtype)


@RULES.of(aten.sum.default)
def _sum_all_below(op: Any, x: Any, *, dtype: Any = None) -> Any:
    """Sums all entries; below autograd."""
    return _sum_below(op, x, None, dtype=dtype)


def _sum(x: Any, stored: Tensor, dims: tuple[int, ...], keepdim: bool, dtype: Any) -> Any:
    if rows_stay(x, dims):
        total = stored.sum([x.stored_dim(d) for d in dims], keepdim, dtype=dtype)
        return without(x, total, () if keepdim else dims)
    return x.sum_rows(stored, dims, keepdim, dtype)


# ---- means and variances ---------------------------------------------------------------------------------------


@RULES.of(torch.mean)
def _mean(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    given = input.stored.dtype
    if not (given.is_floating_point or given.is_complex or dtype is not None):
        raise RuntimeError(f"mean: expected a floating point or complex dtype, got {given}; give dtype")
    if (of_features := within_entries(func, input, dim, keepdim, dtype=dtype)) is not None:
        return of_features
    # Half precision is summed in float32, since the sum may overflow where the mean does not.
    total = _sum_above(func, input, dim, keepdim, dtype=dtype or sum_dtype(given))
    return (total / count(func, input, dim, keepdim)).to(dtype or given)


@RULES.of(torch.var, torch.std)
def _variance(
    func: Any,
    input: Any,
    dim: Any = None,
    unbiased: Any = None,
    keepdim: bool = False,
    *,
    correction: Any = 1,
) -> Any:
    dim, correction = _variance_options(dim, unbiased, correction)
    of_features = within_entries(func, input, dim, keepdim, correction=correction)
    if of_features is not None:
        return of_features
    if sum_dtype(input.dtype) != input.dtype:
        wide = func(input.to(sum_dtype(input.dtype)), dim, correction=correction, keepdim=keepdim)
        return wide.to(input.dtype)
    off = input - input.mean(dim, keepdim=True)
    squares = (off * off.conj()).real if off.is_complex() else off * off
    number = count(func, input, dim, keepdim) - correction
    number = number.clamp(min=0) if isinstance(number, Tensor) else torch.sym_max(number, 0)
    var = squares.sum(dim, keepdim=keepdim) / number
    if func.__name__ == "var":
        return var
    is_zero = var == 0  # where PyTorch's std has the derivative 0, and a square root has none
    return var.masked_fill(is_zero, 1).sqrt().masked_fill(is_zero, 0)


@RULES.of(torch.var_mean, torch.std_mean)
def _variance_and_mean(func: Any, input: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    spread = torch.var if func.__name__ == "var_mean" else torch.std
    keepdim = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
    over = None if isinstance(dim, bool) else dim
    return spread(input, dim, *args, **kwargs), input.mean(over, keepdim)


def _variance_options(dim: Any, unbiased: Any, correction: Any) -> tuple[Any, Any]:
    """Returns the dimensions and the correction from either signature: ``var(x, False)`` has no dimension."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if unbiased is not None:
        return dim, int(unbiased)
    return dim, 1 if correction is None else correction


# ---- reductions ------------------------------------------------------------------------------------------------


@RULES.of(*REDUCTIONS)
def _reduction(func: Any, input: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    kwargs = without_out(func, input, kwargs)
    function = getattr(torch, func.__name__)  # Tensor.amax and torch.amax are one op
    if function in (torch.any, torch.all) and isinstance(dim, list | tuple) and not dim:  # reduces nothing
        return (input != 0).to(torch.uint8 if input.dtype == torch.uint8 else torch.bool)
    if dim is None and function in (torch.argmax, torch.argmin):
        raise DispatchError(
            f"{func.__name__}: an index into all entries of {shown(input)} has no meaning",
            code="argument-refused",
            hint="give dim",
        )
    if function is torch.logsumexp:  # the fill of integers is a value that counts
        counts = not (input.is_floating_point() or input.is_complex())
        input = input.to(torch.get_default_dtype()) if counts else input
    return reduce(function, input, dim, keepdim, *REDUCTIONS[function], **kwargs)


@RULES.of(torch.aminmax)
def _aminmax(func: Any, input: Any, *, dim: Any = None, keepdim: bool = False, out: Any = None) -> Any:
    without_out(func, input, {"out": out})
    dims = () if dim is None else dim
    return torch.return_types.aminmax((torch.amin(input, dims, keepdim), torch.amax(input, dims, keepdim)))


@RULES.of(torch.max, torch.min)
def _extremum(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    largest = func.__name__ == "max"
    kwargs = without_out(func, input, kwargs)
    if "other" in kwargs or (args and isinstance(args[0], Tensor)):
        return (torch.maximum if largest else torch.minimum)(input, *args, **kwargs)
    if not args and not kwargs:
        return torch.amax(input) if largest else torch.amin(input)
    dim = args[0] if args else kwargs["dim"]
    keepdim = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
    function = torch.max if largest else torch.min
    return reduce(function, input, dim, keepdim, lowest if largest else highest, True)


@RULES.of(torch.histc)
def _histc(func: Any, input: Any, bins: int = 100, min: float = 0, max: float = 0, *, out: Any = None) -> Any:
    without_out(func, input, {"out": out})
    if input.has_gaps and min == max:
        raise DispatchError(
            f"histc: expected min and max for {shown(input)}, got the bounds of its elements",
            code="argument-refused",
            hint="pass min=x.amin().item() and max=x.amax().item()",
        )
    return func(input.clean(highest(input.dtype)), bins, min, max)


@RULES.of(torch.linalg.vector_norm)
def _vector_norm(
    func: Any, x: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    def norm(t: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        return torch.linalg.vector_norm(t, ord, dim, keepdim, dtype=dtype)

    return reduce(norm, x, dim, keepdim, constant(math.inf if ord < 0 else 0), ord < 0)


@RULES.of(torch.linalg.norm)
def _linalg_norm(
    func: Any, A: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    matrix = not isinstance(dim, int) and len(dim if dim is not None else A.shape) == 2
    if not (ord is None or (matrix and ord == "fro") or (isinstance(ord, int | float) and not matrix)):
        raise DispatchError(
            f"norm: expected a vector norm of {shown(A)}, got ord={ord!r} and dim={dim}",
            code="argument-refused",
        )
    return torch.linalg.vector_norm(A, 2 if ord in (None, "fro") else ord, dim, keepdim, dtype=dtype)


@RULES.of(torch.norm)
def _norm(func: Any, input: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, **rest: Any) -> Any:
    dtype = without_out(func, input, rest).get("dtype")
    if p not in ("fro", None) and not isinstance(p, int | float):
        raise DispatchError(
            f"norm: expected a vector norm of {shown(input)}, p='fro' or a number, got p={p!r}",
            code="argument-refused",
            hint="x.to_dense() gives a tensor without this limit",
        )
    return torch.linalg.vector_norm(input, 2 if p in ("fro", None) else p, dim, keepdim, dtype=dtype)


# ---- ops that keep the size ------------------------------------------------------------------------------------


@RULES.of(*ALONG)
def _along(func: Any, input: Any, dim: int, *args: Any, **kwargs: Any) -> Any:
    function, kwargs = getattr(torch, func.__name__), without_out(func, input, kwargs)
    if kwargs.get("dtype") is not None:  # first, as in PyTorch: the fill depends on the dtype
        input = input.to(kwargs.pop("dtype"))
    return run_along(function, input, dim, ALONG[function], *args, **kwargs)


@RULES.of(torch.sort, torch.argsort)
def _sort(func: Any, input: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    function, fill = getattr(torch, func.__name__), lowest if descending else last
    # Stable, so that an entry that equals the fill comes before the fill.
    return run_along(function, input, dim, fill, descending=descending, stable=True)
