"""Rules that are one for both layouts, by family: reductions, ops along a dimension, losses of two operands.

The tables say for each op what stands where there is no entry, so that it changes no result. What an op does with that
differs between the layouts, and each gives it as a few functions (`Ways`); everything else is said here, once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.segments import sum_dtype

Fill = Callable[[torch.dtype], float | int | bool]

# ---- what changes no result ------------------------------------------------------------------------------------


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

# Losses of two operands.
ELEMENTWISE = (
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.gaussian_nll_loss,
    F.hinge_embedding_loss,
    F.huber_loss,
    F.kl_div,
    F.l1_loss,
    F.mse_loss,
    F.poisson_nll_loss,
    F.smooth_l1_loss,
    F.soft_margin_loss,
)


class Ways(NamedTuple):
    """How a layout reduces.

    Attributes:
        reduce: ``(func, x, dim, keepdim, fill, needs_entry, **kwargs)``: an op that reduces dimensions, on a table
            that is filled by ``fill`` where entries come together.
        run_along: ``(func, x, dim, fill, *args, **kwargs)``: the same for an op that keeps the size.
        of_features: ``(func, x, dim, keepdim, **kwargs)``: an op within each entry; None where ``dim`` is more.
        count: ``(func, x, dim, keepdim)``: how many elements each result of a reduction is made of.
        shown: a value in the words of an error.
    """

    reduce: Callable[..., Any]
    run_along: Callable[..., Any]
    of_features: Callable[..., Any]
    count: Callable[..., Any]
    shown: Callable[[Any], str]


def each(result: Any, wrap: Callable[[Tensor], Any]) -> Any:
    """The wrapped result, or a named tuple of wrapped results."""
    if isinstance(result, Tensor):
        return wrap(result)
    return type(result)(tuple(wrap(part) for part in result))


def keepdim_of(func: Any, keepdim: bool) -> dict[str, bool]:
    """``keepdim`` for an op that has one."""
    return {} if func is torch.count_nonzero else {"keepdim": keepdim}


def without_out(func: Any, x: Any, kwargs: dict[str, Any], shown: Callable[[Any], str]) -> dict[str, Any]:
    """The options without ``out=None``.

    Raises:
        DispatchError: there is a tensor to write to, whose size would be that of what is stored.
    """
    if kwargs.get("out") is not None:
        raise DispatchError(
            f"{func.__name__}: a result of {shown(x)} is a new one, and not written to an out="
        )
    return {k: v for k, v in kwargs.items() if k != "out"}


# ---- means and variances ---------------------------------------------------------------------------------------


def implement_means(cls: Any, ways: Ways) -> None:
    """The rules of ``mean``, ``var``, ``std`` and their pairs, on sums that count what exists."""

    @cls.implements(torch.mean)
    def _(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
        if not (input.is_floating_point() or input.is_complex() or dtype is not None):
            raise RuntimeError(
                f"mean: expected a floating point or complex dtype, got {input.dtype}; give dtype"
            )
        # Half precision is summed in float32: the sum may be beyond its range where the mean is not.
        total = input.sum(dim, keepdim, dtype=dtype or sum_dtype(input.dtype))
        return (total / ways.count(func, input, dim, keepdim)).to(dtype or input.dtype)

    @cls.implements(torch.var, torch.std)
    def _(
        func: Any,
        input: Any,
        dim: Any = None,
        unbiased: Any = None,
        keepdim: bool = False,
        *,
        correction: Any = 1,
    ) -> Any:
        dim, correction = _variance_options(dim, unbiased, correction)
        of_features = ways.of_features(func, input, dim, keepdim, correction=correction)
        if of_features is not None:
            return of_features
        if sum_dtype(input.dtype) != input.dtype:
            wide = func(input.to(sum_dtype(input.dtype)), dim, correction=correction, keepdim=keepdim)
            return wide.to(input.dtype)
        off = input - input.mean(dim, keepdim=True)
        squares = (off * off.conj()).real if off.is_complex() else off * off
        number = ways.count(func, input, dim, keepdim) - correction
        number = number.clamp(min=0) if isinstance(number, Tensor) else torch.sym_max(number, 0)
        var = squares.sum(dim, keepdim=keepdim) / number
        return var if func.__name__ == "var" else var.sqrt()

    @cls.implements(torch.var_mean, torch.std_mean)
    def _(
        func: Any,
        input: Any,
        dim: Any = None,
        unbiased: Any = None,
        keepdim: bool = False,
        *,
        correction: Any = 1,
    ) -> Any:
        dim, correction = _variance_options(dim, unbiased, correction)
        spread = torch.var if func.__name__ == "var_mean" else torch.std
        return spread(input, dim, correction=correction, keepdim=keepdim), input.mean(dim, keepdim)


def _variance_options(dim: Any, unbiased: Any, correction: Any) -> tuple[Any, Any]:
    """The dimensions and the correction, however they were written: ``var(x, False)`` names no dimension."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if unbiased is not None:
        return dim, int(unbiased)
    return dim, 1 if correction is None else correction


# ---- reductions ------------------------------------------------------------------------------------------------


def implement_reductions(cls: Any, ways: Ways) -> None:
    """The rules of the ops in `REDUCTIONS`, extrema and norms."""

    @cls.implements(*REDUCTIONS)
    def _(func: Any, input: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
        kwargs = without_out(func, input, kwargs, ways.shown)
        function = getattr(torch, func.__name__)  # Tensor.amax and torch.amax are one op
        if dim is None and function in (torch.argmax, torch.argmin):
            raise DispatchError(
                f"{func.__name__}: an index into all entries of {ways.shown(input)} has no meaning; give dim"
            )
        if function is torch.logsumexp:  # the least integer may count
            counts = not (input.is_floating_point() or input.is_complex())
            input = input.to(torch.get_default_dtype()) if counts else input
        return ways.reduce(function, input, dim, keepdim, *REDUCTIONS[function], **kwargs)

    @cls.implements(torch.aminmax)
    def _(func: Any, input: Any, *, dim: Any = None, keepdim: bool = False, out: Any = None) -> Any:
        without_out(func, input, {"out": out}, ways.shown)
        dims = () if dim is None else dim
        return torch.return_types.aminmax(
            (torch.amin(input, dims, keepdim), torch.amax(input, dims, keepdim))
        )

    @cls.implements(torch.max, torch.min)
    def _(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        largest = func.__name__ == "max"
        kwargs = without_out(func, input, kwargs, ways.shown)
        if "other" in kwargs or (args and isinstance(args[0], Tensor)):
            return (torch.maximum if largest else torch.minimum)(input, *args, **kwargs)
        if not args and not kwargs:
            return torch.amax(input) if largest else torch.amin(input)
        dim = args[0] if args else kwargs["dim"]
        keepdim = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
        function = torch.max if largest else torch.min
        return ways.reduce(function, input, dim, keepdim, lowest if largest else highest, True)

    implement_norms(cls, ways)


def implement_norms(cls: Any, ways: Ways) -> None:
    """The rules of vector norms."""

    @cls.implements(torch.linalg.vector_norm)
    def _(
        func: Any, x: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
    ) -> Any:
        def norm(t: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
            return torch.linalg.vector_norm(t, ord, dim, keepdim, dtype=dtype)

        return ways.reduce(norm, x, dim, keepdim, constant(math.inf if ord < 0 else 0), ord < 0)

    @cls.implements(torch.linalg.norm)
    def _(
        func: Any, A: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
    ) -> Any:
        matrix = not isinstance(dim, int) and len(dim if dim is not None else A.shape) == 2
        if not (ord is None or (matrix and ord == "fro") or (isinstance(ord, int | float) and not matrix)):
            raise DispatchError(
                f"norm: expected a vector norm of {ways.shown(A)}, got ord={ord!r} and dim={dim}"
            )
        return torch.linalg.vector_norm(A, 2 if ord in (None, "fro") else ord, dim, keepdim, dtype=dtype)

    @cls.implements(torch.norm)
    def _(func: Any, input: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, **rest: Any) -> Any:
        dtype, out = rest.get("dtype"), rest.get("out")
        if (p not in ("fro", None) and not isinstance(p, int | float)) or out is not None:
            raise DispatchError(
                f"norm: expected a vector norm of {ways.shown(input)}, and no out=, got p={p!r}"
            )
        return torch.linalg.vector_norm(input, 2 if p in ("fro", None) else p, dim, keepdim, dtype=dtype)


# ---- ops that keep the size ------------------------------------------------------------------------------------


def implement_along(cls: Any, ways: Ways) -> None:
    """The rules of the ops in `ALONG`, and of sorting."""

    @cls.implements(*ALONG)
    def _(func: Any, input: Any, dim: int, *args: Any, **kwargs: Any) -> Any:
        function, kwargs = getattr(torch, func.__name__), without_out(func, input, kwargs, ways.shown)
        if kwargs.get("dtype") is not None:  # first, as in PyTorch: what stands for none depends on it
            input = input.to(kwargs.pop("dtype"))
        return ways.run_along(function, input, dim, ALONG[function], *args, **kwargs)

    @cls.implements(torch.sort, torch.argsort)
    def _(func: Any, input: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
        function, fill = getattr(torch, func.__name__), lowest if descending else last
        # Stable, so that an entry as low as what stands for none comes before it.
        return ways.run_along(function, input, dim, fill, descending=descending, stable=True)


# ---- losses of two operands ------------------------------------------------------------------------------------


def implement_losses(
    cls: Any,
    first: Callable[[Any], Any],
    beside: Callable[[Any, Any, Any], Any],
    wrap: Callable[[Any, Tensor], Any],
    batch_size: Callable[[Any], Any],
) -> None:
    """The rules of the losses in `ELEMENTWISE`.

    Args:
        cls: the layout.
        first: the value among operands whose rows count.
        beside: ``(func, x, operand)``: an operand as a plain tensor that lies as the entries of ``x`` do.
        wrap: what the loss gave for such tensors, as a value with the rows of ``x``.
        batch_size: the extent of the first dimension, as far as it exists.
    """

    @cls.implements(*ELEMENTWISE)
    def _(func: Any, input: Any, target: Any, *args: Any, reduction: str = "mean", **kwargs: Any) -> Any:
        x = first((input, target))
        if any(v is not None for v in (kwargs.pop("size_average", None), kwargs.pop("reduce", None))):
            raise DispatchError(f"{func.__name__}: size_average and reduce are deprecated; use reduction")
        operands = [beside(func, x, t) for t in (input, target, *args)]
        kwargs = {k: beside(func, x, v) for k, v in kwargs.items()}
        loss = wrap(x, func(*operands, reduction="none", **kwargs))
        match reduction:
            case "none":
                return loss
            case "sum":
                return loss.sum()
            case "batchmean":
                return loss.sum() / batch_size(x)
            case "mean":
                return loss.mean()
        raise ValueError(f"{func.__name__}: {reduction} is not a valid value for reduction")
