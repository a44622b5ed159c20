"""Order statistics: medians, quantiles and the k-th value of the entries that exist.

Within an entry the op itself runs. Across entries a table is sorted, with a fill that sorts last where there is no
entry. The position of the statistic depends on the number of entries. The host reads no data.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.base import shown
from subclasses.ragged.checks import check_all_exist
from subclasses.ragged.registry import Rules
from subclasses.ragged.rules.reducing import count, last, reduce

RULES = Rules()

INTERPOLATIONS = ("linear", "lower", "higher", "midpoint", "nearest")

# ---- the rules -------------------------------------------------------------------------------------------------


@RULES.of(torch.median, torch.nanmedian)
def _median(func: Any, input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    function = torch.median if func.__name__ == "median" else torch.nanmedian
    if dim is None:
        return _median_of_all(function, input)
    counts = count(func, input, dim, True)

    def middle(t: Tensor, dim: int, keepdim: bool) -> Any:
        if not isinstance(counts, Tensor):  # within an entry
            return function(t, dim, keepdim)
        ordered, order = t.sort(dim=dim, stable=True)
        known = _known(t, counts, dim)
        position = _lower_middle(known)
        if function is torch.median:  # NaN sorts last, and is the median if there is one
            position = torch.where(known < counts, known, position)
        return _at(torch.return_types.median, ordered, order, position, dim, keepdim)

    middle.__name__ = func.__name__
    return reduce(middle, input, dim, keepdim, last, True)


def _median_of_all(function: Any, x: Any) -> Any:
    number = count(function, x, None, False)

    def middle(t: Tensor) -> Tensor:
        if t.is_floating_point():  # gaps are NaN
            median = torch.nanmedian(t)
            if function is torch.nanmedian:
                return median
            return torch.where((~t.isnan()).sum() < number, math.nan, median)
        counted = number if isinstance(number, Tensor) else torch.tensor(number, device=t.device)
        return t.flatten().sort().values.index_select(0, _lower_middle(counted).view(1)).squeeze(0)

    middle.__name__ = function.__name__
    return reduce(middle, x, None, False, last, not x.is_floating_point())


@RULES.of(torch.kthvalue)
def _kthvalue(func: Any, input: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    counts = count(func, input, dim, True)
    if isinstance(counts, Tensor):
        check_all_exist(input, func.__name__)
        _check_reached(input, k, counts)

    def kth(t: Tensor, dim: int, keepdim: bool) -> Any:
        if not isinstance(counts, Tensor):
            return torch.kthvalue(t, k, dim, keepdim)
        ordered, order = t.sort(dim=dim, stable=True)
        position = torch.full_like(order.narrow(dim, 0, 1), k - 1)
        return _at(torch.return_types.kthvalue, ordered, order, position, dim, keepdim)

    kth.__name__ = func.__name__
    return reduce(kth, input, dim, keepdim, last, True)


@RULES.of(torch.quantile, torch.nanquantile)
def _quantile(
    func: Any,
    input: Any,
    q: Any,
    dim: Any = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
) -> Any:
    if dim is None or (isinstance(q, Tensor) and q.dim() > 0):
        raise DispatchError(
            f"{func.__name__}: expected one q and a dim of {shown(input)}, got q={q!r} and dim={dim}",
            code="argument-refused",
        )
    if not isinstance(q, Tensor) and not 0 <= q <= 1:
        raise RuntimeError(f"{func.__name__}: expected q between 0 and 1, got {q}")
    if interpolation not in INTERPOLATIONS:
        raise RuntimeError(
            f"{func.__name__}: expected interpolation 'linear', 'lower', 'higher', 'midpoint' or 'nearest', got "
            f"{interpolation!r}"
        )
    function = torch.quantile if func.__name__ == "quantile" else torch.nanquantile
    counts = count(func, input, dim, True)

    def at_share(t: Tensor, dim: int, keepdim: bool) -> Tensor:
        if not isinstance(counts, Tensor):
            return function(t, q, dim, keepdim, interpolation=interpolation)
        ordered, known = t.sort(dim=dim, stable=True).values, _known(t, counts, dim)
        result = _between(ordered, (known - 1).clamp(min=0) * q, dim, interpolation)
        nothing = known == 0 if function is torch.nanquantile else known < counts
        result = torch.where(nothing, math.nan, result)
        return result if keepdim else result.squeeze(dim)

    at_share.__name__ = func.__name__
    return reduce(at_share, input, dim, keepdim, last, True)


# ---- positions in a sorted table -------------------------------------------------------------------------------


def _known(t: Tensor, counts: Tensor, dim: int) -> Tensor:
    """Returns how many existing elements are not NaN; padding of floating point values is NaN."""
    if not t.is_floating_point():
        return counts.expand_as(t.narrow(dim, 0, 1))
    return (~t.isnan()).sum(dim, keepdim=True)


def _lower_middle(count: Tensor) -> Tensor:
    return (count - 1).clamp(min=0).div(2, rounding_mode="floor")


def _at(kind: Any, ordered: Tensor, order: Tensor, position: Tensor, dim: int, keepdim: bool) -> Any:
    picked = [torch.take_along_dim(t, position, dim) for t in (ordered, order)]
    return kind(picked if keepdim else [t.squeeze(dim) for t in picked])


def _between(ordered: Tensor, share: Tensor, dim: int, interpolation: str) -> Tensor:
    """Returns the values at positions that need not be integers, by interpolation."""
    low, high = share.floor().long(), share.ceil().long()
    if interpolation in ("lower", "higher", "nearest"):
        position = {"lower": low, "higher": high, "nearest": share.round().long()}[interpolation]
        return torch.take_along_dim(ordered, position, dim)
    below, above = (torch.take_along_dim(ordered, position, dim) for position in (low, high))
    if interpolation == "midpoint":
        return below.lerp(above, 0.5)
    return below.lerp(above, (share - low).to(ordered.dtype))


def _check_reached(x: Any, k: int, counts: Tensor) -> None:
    """Raises if ``k`` is less than 1; asserts that each result has ``k`` elements, asynchronously on a GPU."""
    if k < 1:
        raise IndexError(f"kthvalue: expected k of at least 1, got {k}")
    message = f"kthvalue: fewer than k={k} entries in a row or position of {shown(x)}"
    torch.ops.aten._assert_async.msg((counts >= k).all(), message)
