"""Quantities with units: metres plus seconds is an error, metres by seconds is a speed.

A unit is static metadata: it is checked when a function compiles, and compiled code does not contain it. A plain
tensor or a number has no unit; an op without a rule is an error, so that no unit is lost. The gradient of a tensor has
the tensor's own unit. The script computes the energy of falling stones, and shows an error.

    python examples/classes/quantity.py
"""

from typing import Any

import torch
from torch import Tensor

import subclasses
from subclasses import TensorSubclass, inner, static

aten = torch.ops.aten
Unit = tuple[tuple[str, int], ...]  # base units in order of their names, with exponents other than 0


class Quantity(TensorSubclass, fallback="views"):
    """`value` in a unit such as `(("m", 1), ("s", -2))`; `value` is differentiable to read."""

    value: Tensor = inner(differentiable=True)
    unit: Unit = static(default=())

    @classmethod
    def of(cls, value: Tensor, **exponents: int) -> "Quantity":
        return cls(value, unit=combine((), tuple(exponents.items())))


class UnitError(NotImplementedError):
    """Units that do not fit; a refusal, as for an op without a rule."""


def split(x: Any) -> tuple[Any, Unit]:
    return (x.unwrap("value"), x.unit) if isinstance(x, Quantity) else (x, ())


def combine(x: Unit, y: Unit, sign: int = 1) -> Unit:
    """The unit of a product, or with sign -1 of a quotient."""
    powers = dict(x)
    for name, n in y:
        powers[name] = powers.get(name, 0) + sign * n
    return tuple(sorted((name, n) for name, n in powers.items() if n))


def show(unit: Unit) -> str:
    return " ".join(name if n == 1 else f"{name}^{n}" for name, n in unit) or "no unit"


def same_unit(x: Any, y: Any) -> tuple[Any, Any, Unit]:
    """The values of two operands, and the unit of both."""
    (a, unit), (b, other) = split(x), split(y)
    if unit != other:
        raise UnitError(f"{show(unit)} and {show(other)} in one sum or comparison")
    return a, b, unit


@Quantity.implements(*(aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor, aten.rsub.Scalar))
def add(func, x, y, **alpha):
    a, b, unit = same_unit(x, y)
    return Quantity(func(a, b, **alpha), unit=unit)


@Quantity.implements(aten.copy_.default)
def copy_(func, x, y, non_blocking=False):
    a, b, _ = same_unit(x, y)
    func(a, b, non_blocking)
    return x


@Quantity.implements(subclasses.comparisons)
def compare(func, x, y):
    a, b, _ = same_unit(x, y)
    return func(a, b)


@Quantity.implements(torch.mul, torch.matmul)
def mul(func, x, y, **out):
    if out:
        return Quantity.unruled(func, x, y, **out)
    (a, unit), (b, other) = split(x), split(y)
    return Quantity(func(a, b), unit=combine(unit, other))


@Quantity.implements(torch.div)
def div(func, x, y):
    (a, unit), (b, other) = split(x), split(y)
    return Quantity(func(a, b), unit=combine(unit, other, -1))


@Quantity.implements(torch.pow, torch.reciprocal)  # 2 / x is 2 * x.reciprocal()
def power(func, x, exponent=-1):
    if not (isinstance(x, Quantity) and isinstance(exponent, int)):
        raise UnitError("a power of a quantity needs an int as its exponent")
    unit = combine((), tuple((name, n * exponent) for name, n in x.unit))
    return Quantity(x.unwrap("value") ** exponent, unit=unit)


@Quantity.implements(aten.sum, aten.mean, aten.neg, aten.div.Scalar)  # the last is the backward of a mean
def linear(func, x, *args, **kwargs):
    return Quantity(func(x.value, *args, **kwargs), unit=x.unit)


def main() -> None:
    height = Quantity.of(torch.tensor([5.0, 20.0], requires_grad=True), m=1)
    gravity, mass = Quantity.of(torch.tensor(9.81), m=1, s=-2), Quantity.of(torch.tensor([2.0, 0.5]), kg=1)
    energy: Any = (mass * gravity * height).sum()
    (gradient,) = torch.autograd.grad(energy.value, height)
    print(f"energy {energy.value:.1f} {show(energy.unit)}, gradient by height {gradient}")
    try:
        torch.add(energy, mass)
    except UnitError as error:
        print(error)


if __name__ == "__main__":
    main()
