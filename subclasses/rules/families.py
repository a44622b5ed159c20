"""Families of ops: one rule for arithmetic, for comparisons, or for reductions.

PyTorch has several ops for one operation: ``x - 2``, ``2 - x`` and ``x.sub(y, alpha=3)`` reach different ones, and
``2 / x`` reaches two. A family contains all of them, and calls its rule with one function and the operands in the order
of the expression. In-place forms follow from the functional ones, as for every rule.

A rule for a single op or a packet takes precedence over one for a family, in any order of registration.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from subclasses._torch import OpOverload, canonicalize_dim

aten = torch.ops.aten

Rule = Callable[..., Any]
# Turns a rule of a family into a rule of one op.
Adapt = Callable[[Rule], Rule]


@dataclass(frozen=True, eq=False)
class Family:
    """A family of ops, for ``Cls.implements``.

    Attributes:
        name: its name.
        call: how a rule is called.
        entries: for each op, how a rule of the family becomes one of the op.
    """

    name: str
    call: str
    entries: Mapping[OpOverload, Adapt] = field(repr=False)


def _adapter(run: Callable[..., Any]) -> Adapt:
    """Makes an adapter of ``run(rule, *args, **kwargs)``; the adapted rule is called with the op before these."""

    def adapt(rule: Rule) -> Rule:
        @functools.wraps(rule)
        def adapted(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
            return run(rule, *args, **kwargs)

        return adapted

    return adapt


# ---- two operands ------------------------------------------------------------------------------------------


def _scaled(y: Any, alpha: Any) -> Any:
    return y if alpha == 1 else y * alpha


def _binary(function: Any) -> Adapt:
    return _adapter(lambda rule, x, y, alpha=1: rule(function, x, _scaled(y, alpha)))


_reflected_sub = _adapter(lambda rule, x, y, alpha=1: rule(torch.sub, y, _scaled(x, alpha)))

arithmetic = Family(
    "arithmetic",
    "rule(func, x, y)",
    {
        **{getattr(aten.add, name): _binary(torch.add) for name in ("Tensor", "Scalar")},
        **{getattr(aten.sub, name): _binary(torch.sub) for name in ("Tensor", "Scalar")},
        **{getattr(aten.mul, name): _binary(torch.mul) for name in ("Tensor", "Scalar")},
        **{getattr(aten.div, name): _binary(torch.div) for name in ("Tensor", "Scalar")},
        aten.rsub.Tensor: _reflected_sub,
        aten.rsub.Scalar: _reflected_sub,
        aten.neg.default: _adapter(lambda rule, x: rule(torch.mul, x, -1)),
        aten.reciprocal.default: _adapter(lambda rule, x: rule(torch.div, 1, x)),
    },
)

comparisons = Family(
    "comparisons",
    "rule(func, x, y)",
    {
        getattr(getattr(aten, name), overload): _binary(getattr(torch, name))
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
        for overload in ("Tensor", "Scalar")
    },
)


# ---- reductions --------------------------------------------------------------------------------------------


def _dims(function: Any, x: Any, dim: Any) -> tuple[int, ...]:
    """Returns dims as non-negative ints, in order.

    None means all dims. So does an empty list, except for ``any`` and ``all``, which then reduce nothing. A value
    without dims has the dims 0 and -1, as a plain tensor does.

    Raises:
        IndexError: there is no such dim.
        RuntimeError: one is named twice. Both errors have PyTorch's message.
    """
    n = x.dim()
    if dim is None or (not isinstance(dim, int) and not dim and function not in (torch.any, torch.all)):
        return tuple(range(n))
    dims = sorted(canonicalize_dim(n, d) for d in ([dim] if isinstance(dim, int) else dim))
    for d, following in itertools.pairwise(dims):
        if d == following:
            raise RuntimeError(f"dim {d} appears multiple times in the list of dims")
    return tuple(dims) if n else ()


def _reduction(function: Any) -> Adapt:
    # torch.std(x, dim, True) takes True as `unbiased`: with `correction` such a call is an error.
    given_always = {"correction": 1} if function in (torch.var, torch.std) else {}

    def run(rule: Rule, x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
        given = {name: value for name, value in kwargs.items() if value is not None}
        return rule(function, x, _dims(function, x, dim), keepdim, **{**given_always, **given})

    return _adapter(run)


_REDUCTIONS = {
    "sum": ("default", "dim_IntList"),
    "mean": ("default", "dim"),
    "amax": ("default",),
    "amin": ("default",),
    "logsumexp": ("default",),
    "any": ("default", "dim", "dims"),
    "all": ("default", "dim", "dims"),
    "var": ("correction",),
    "std": ("correction",),
}

reductions = Family(
    "reductions",
    "rule(func, x, dim, keepdim, **kwargs)",
    {
        **{
            getattr(getattr(aten, name), overload): _reduction(getattr(torch, name))
            for name, overloads in _REDUCTIONS.items()
            for overload in overloads
        },
        aten.max.default: _reduction(torch.amax),
        aten.min.default: _reduction(torch.amin),
    },
)
