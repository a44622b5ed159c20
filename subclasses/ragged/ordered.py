"""Order statistics for both layouts: medians, quantiles, the k-th of what exists.

Within an entry the op itself runs. Across entries all are sorted, with what sorts last where there is no entry, and
counted; the statistic is then found at a place that depends on the count. Nothing is read on the host.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.families import Ways, last

# ---- the rules -------------------------------------------------------------------------------------------------


def implement_ordered(cls: Any, ways: Ways) -> None:
    """The rules of ``median``, ``nanmedian``, ``kthvalue``, ``quantile`` and ``nanquantile``."""
    cls.implements(torch.median, torch.nanmedian)(functools.partial(_median, ways))
    cls.implements(torch.kthvalue)(functools.partial(_kthvalue, ways))
    cls.implements(torch.quantile, torch.nanquantile)(functools.partial(_quantile, ways))


def _median(ways: Ways, func: Any, input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    function = torch.median if func.__name__ == "median" else torch.nanmedian
    if dim is None:
        return _median_of_all(ways, function, input)
    counts = ways.count(func, input, dim, True)

    def middle(t: Tensor, dim: int, keepdim: bool) -> Any:
        if not isinstance(counts, Tensor):  # within an entry
            return function(t, dim, keepdim)
        ordered, order = t.sort(dim=dim, stable=True)
        known = _known(t, counts, dim)
        place = _lower_middle(known)
        if function is torch.median:  # a NaN sorts behind all, and is the median where there is one
            place = torch.where(known < counts, known, place)
        return _at(torch.return_types.median, ordered, order, place, dim, keepdim)

    middle.__name__ = func.__name__
    return ways.reduce(middle, input, dim, keepdim, last, True)


def _median_of_all(ways: Ways, function: Any, x: Any) -> Any:
    count = ways.count(function, x, None, False)

    def middle(t: Tensor) -> Tensor:
        if not t.numel():
            return function(t)
        if t.is_floating_point():  # what does not exist is NaN
            found = torch.nanmedian(t)
            return (
                found
                if function is torch.nanmedian
                else torch.where((~t.isnan()).sum() < count, math.nan, found)
            )
        number = count if isinstance(count, Tensor) else torch.tensor(count, device=t.device)
        return t.flatten().sort().values.index_select(0, _lower_middle(number).view(1)).squeeze(0)

    middle.__name__ = function.__name__
    return ways.reduce(middle, x, None, False, last, not x.is_floating_point())


def _kthvalue(ways: Ways, func: Any, input: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    counts = ways.count(func, input, dim, True)
    if isinstance(counts, Tensor):
        _check_reached(ways, input, k, counts)

    def kth(t: Tensor, dim: int, keepdim: bool) -> Any:
        if not isinstance(counts, Tensor):
            return torch.kthvalue(t, k, dim, keepdim)
        ordered, order = t.sort(dim=dim, stable=True)
        place = torch.full_like(order.narrow(dim, 0, 1), k - 1)
        return _at(torch.return_types.kthvalue, ordered, order, place, dim, keepdim)

    kth.__name__ = func.__name__
    return ways.reduce(kth, input, dim, keepdim, last, True)


def _quantile(  # noqa: PLR0913
    ways: Ways,
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
            f"{func.__name__}: expected one q and a dim of {ways.shown(input)}, got q={q!r} and dim={dim}"
        )
    if not isinstance(q, Tensor) and not 0 <= q <= 1:
        raise RuntimeError(f"{func.__name__}: expected q between 0 and 1, got {q}")
    function = torch.quantile if func.__name__ == "quantile" else torch.nanquantile
    counts = ways.count(func, input, dim, True)

    def at_share(t: Tensor, dim: int, keepdim: bool) -> Tensor:
        if not isinstance(counts, Tensor):
            return function(t, q, dim, keepdim, interpolation=interpolation)
        ordered, known = t.sort(dim=dim, stable=True).values, _known(t, counts, dim)
        result = _between(ordered, (known - 1).clamp(min=0) * q, dim, interpolation)
        nothing = known == 0 if function is torch.nanquantile else known < counts
        result = torch.where(nothing, math.nan, result)
        return result if keepdim else result.squeeze(dim)

    at_share.__name__ = func.__name__
    return ways.reduce(at_share, input, dim, keepdim, last, True)


# ---- places in what is sorted ----------------------------------------------------------------------------------


def _known(t: Tensor, counts: Tensor, dim: int) -> Tensor:
    """How many of what exists are no NaN; the padding of floating point values is."""
    if not t.is_floating_point():
        return counts.expand_as(t.narrow(dim, 0, 1))
    return (~t.isnan()).sum(dim, keepdim=True)


def _lower_middle(count: Tensor) -> Tensor:
    return (count - 1).clamp(min=0).div(2, rounding_mode="floor")


def _at(kind: Any, ordered: Tensor, order: Tensor, place: Tensor, dim: int, keepdim: bool) -> Any:
    found = [torch.take_along_dim(t, place, dim) for t in (ordered, order)]
    return kind(found if keepdim else [t.squeeze(dim) for t in found])


def _between(ordered: Tensor, share: Tensor, dim: int, interpolation: str) -> Tensor:
    """What lies at places that need not be whole."""
    low, high = share.floor().long(), share.ceil().long()
    if interpolation in ("lower", "higher", "nearest"):
        place = {"lower": low, "higher": high, "nearest": share.round().long()}[interpolation]
        return torch.take_along_dim(ordered, place, dim)
    below, above = (torch.take_along_dim(ordered, place, dim) for place in (low, high))
    if interpolation == "midpoint":
        return below.lerp(above, 0.5)
    if interpolation != "linear":
        raise RuntimeError(f"quantile: {interpolation!r} is not a valid value for interpolation")
    return below.lerp(above, (share - low).to(ordered.dtype))


def _check_reached(ways: Ways, x: Any, k: int, counts: Tensor) -> None:
    """Raises where there are fewer than ``k`` to choose from; nothing waits for a GPU."""
    if k < 1:
        raise IndexError(f"kthvalue: expected k of at least 1, got {k}")
    message = f"kthvalue: fewer than k={k} entries in a row or position of {ways.shown(x)}"
    torch.ops.aten._assert_async.msg((counts >= k).all(), message)
