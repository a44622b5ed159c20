"""Values that a rule for an op makes on the way: their inner tensors are read raw, and lead the gradient on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import subclasses
from subclasses import TensorSubclass, inner, static
from tests.subclasses.subjects import MODES

aten = torch.ops.aten


class Length(TensorSubclass, fallback="views"):
    number: Tensor = inner()
    unit: float = static(default=1.0)

    def to_unit(self, unit):
        return Length(self.number * (self.unit / unit), unit=unit)


@Length.implements(subclasses.arithmetic)
def _(func, x, y):
    if isinstance(x, Length) and isinstance(y, Length):
        return Length(func(x.number, y.to_unit(x.unit).number), unit=x.unit)
    return Length(func(x.number, y), unit=x.unit)


# By ops on the value that was made, and on what they make of it.
@Length.implements(aten.atan2.default)
def _(func, x, y):
    return Length(x.number + ((y.to_unit(x.unit) * 3)[:2].clone() - x).number, unit=x.unit)


class Log(TensorSubclass, fallback="materialize"):
    log: Tensor = inner()

    def materialize(self):
        return self.log.exp()


@Log.implements(aten.mul.Tensor)
def _(func, x, y):
    x, y = (t if isinstance(t, Log) else Log(torch.as_tensor(t).log()) for t in (x, y))
    return Log(x.log + y.log)


class Wrapped(TensorSubclass, fallback="map"):
    """Makes values of another class in its rule."""

    held: Tensor = inner()


@Wrapped.implements(aten.mul.Tensor)
def _(func, x, y):
    return Wrapped(x.held * Length(y.held, unit=2.0).to_unit(1.0).number)


def metres(a, b):
    return Length(a, unit=2.0), Length(b, unit=4.0)


# A function of two tensors, and the same without the classes.
CASES = {
    "a method of the class": (
        lambda a, b: (metres(a, b)[0] + metres(a, b)[1]).unwrap("number"),
        lambda a, b: a + 2 * b,
    ),
    "in place": (
        lambda a, b: (metres(a, b)[0] * 1).add_(metres(a, b)[1]).unwrap("number"),
        lambda a, b: a + 2 * b,
    ),
    "ops on what was made": (
        lambda a, b: torch.atan2(*metres(a, b)).unwrap("number"),
        lambda a, b: a + 6 * b - a,
    ),
    "twice": (
        lambda a, b: (metres(a, b)[0] + metres(a, b)[1] + metres(a, b)[1]).unwrap("number"),
        lambda a, b: a + 4 * b,
    ),
    "a plain operand": (lambda a, b: (Log(a) * b).materialize(), lambda a, b: a.exp() * b),
    "another class": (lambda a, b: (Wrapped(a) * Wrapped(b)).unwrap("held"), lambda a, b: 2 * a * b),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("door", MODES)
@pytest.mark.parametrize("case", CASES)
def test_what_a_rule_makes_leads_the_gradient_on(case, door):
    function, plain = CASES[case]
    leaves = [torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0, 4.0], requires_grad=True)]
    compiled = MODES[door](function)
    for _ in range(2):
        got, expected = (f(*leaves).square().sum() for f in (compiled, plain))
        torch.testing.assert_close(got, expected)
        gradients = [torch.autograd.grad(y, leaves, allow_unused=True) for y in (got, expected)]
        torch.testing.assert_close(*gradients)


def test_they_lead_it_on_twice():
    a, b = (torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradgradcheck(lambda a, b: (Log(a) * b).materialize(), (a, b))


def test_outside_of_a_rule_they_are_raw():
    """As of any value: only ``unwrap``, and a field that says so, are differentiable."""
    a = torch.ones(2, requires_grad=True)
    x = Length(a, unit=2.0)
    (x + x).unwrap("number").sum().backward()
    assert not x.number.requires_grad and not x.to_unit(1.0).number.requires_grad


class Compared(TensorSubclass, fallback="map"):
    held: Tensor = inner()


@Compared.implements(aten.mul.Tensor)
def _(func, x, y):
    made = Compared(x.held * 2)
    fixed = (made + 1.0).detach().held + torch.zeros_like(made).held
    return Compared(torch.where((made > 1.0).held, func(x.held, y.held), x.held + fixed * 0))


class Masked(TensorSubclass, fallback="views"):
    held: Tensor = inner()


@Masked.implements(aten.gt.Scalar)
def _(func, x, y):
    return Masked(func(x.held, y))


@Masked.implements(aten.mul.Tensor)
def _(func, x, y):
    return Masked(torch.where((Masked(x.held * 2) > 1.0).held, func(x.held, y.held), x.held))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cls", [Compared, Masked])
def test_what_has_no_derivative_may_be_made_on_the_way(cls, mode):
    leaves = [
        torch.tensor([0.2, 2.0, 3.0], requires_grad=True),
        torch.tensor([1.0, 4.0, 5.0], requires_grad=True),
    ]
    out = MODES[mode](lambda u, v: (cls(u) * cls(v)).unwrap("held"))(*leaves)
    gradients = torch.autograd.grad(out.sum(), leaves)
    torch.testing.assert_close([g.tolist() for g in gradients], [[1.0, 4.0, 5.0], [0.0, 2.0, 3.0]])
