"""Values that a rule for an op makes on the way: their inner tensors are read raw, and lead the gradient on."""

from __future__ import annotations

import pytest
import torch

import subclasses
from subclasses import inner, static
from tests.doors import DOORS
from tests.subclasses.autograd.judge import agree, numbers
from tests.subclasses.subjects import declare

aten = torch.ops.aten


def length(func, x, y):
    if isinstance(x, Length) and isinstance(y, Length):
        return Length(func(x.number, y.to_unit(x.unit).number), unit=x.unit)
    return Length(func(x.number, y), unit=x.unit)


def by_ops(func, x, y):
    """By ops on the value that was made, and on what they make of it."""
    return Length(x.number + ((y.to_unit(x.unit) * 3)[:2].clone() - x).number, unit=x.unit)


Length = declare(
    keywords={"fallback": "views"},
    number=inner(),
    unit=static(default=1.0),
    to_unit=lambda self, unit: Length(self.number * (self.unit / unit), unit=unit),
    rules={subclasses.arithmetic: length, aten.atan2.default: by_ops},
)


def product(func, x, y):
    x, y = (t if isinstance(t, Log) else Log(torch.as_tensor(t).log()) for t in (x, y))
    return Log(x.log + y.log)


Log = declare(
    keywords={"fallback": "materialize"},
    log=inner(),
    materialize=lambda self: self.log.exp(),
    rules={aten.mul.Tensor: product},
)


def of_another_class(func, x, y):
    return Wrapped(x.held * Length(y.held, unit=2.0).to_unit(1.0).number)


def of_its_own_class(func, x, y):
    made = Compared(x.held * 2)
    fixed = (made + 1.0).detach().held + torch.zeros_like(made).held
    return Compared(torch.where((made > 1.0).held, func(x.held, y.held), x.held + fixed * 0))


def masked(func, x, y):
    return Masked(torch.where((Masked(x.held * 2) > 1.0).held, func(x.held, y.held), x.held))


Wrapped = declare(keywords={"fallback": "map"}, rules={aten.mul.Tensor: of_another_class})
Compared = declare(keywords={"fallback": "map"}, rules={aten.mul.Tensor: of_its_own_class})
Masked = declare(
    keywords={"fallback": "views"},
    rules={aten.mul.Tensor: masked, aten.gt.Scalar: lambda func, x, y: Masked(func(x.held, y))},
)


def metres(a, b):
    return Length(a, unit=2.0), Length(b, unit=4.0)


def compared(a, b):
    return torch.where(2 * a > 1.0, a * b, a)


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
    "a comparison": (
        lambda a, b: (Compared(a - 0.5) * Compared(b)).unwrap("held"),
        lambda a, b: compared(a - 0.5, b),
    ),
    "a mask": (lambda a, b: (Masked(a - 0.5) * Masked(b)).unwrap("held"), lambda a, b: compared(a - 0.5, b)),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("case", CASES)
def test_what_a_rule_makes_leads_the_gradient_on(case, door):
    agree(*CASES[case], numbers(2, 2), door=door)


def test_they_lead_it_on_twice():
    agree(*CASES["a plain operand"], numbers(2, 2), twice=True)


def test_outside_of_a_rule_they_are_raw():
    """As of any value: only ``unwrap``, and a field that says so, are differentiable."""
    a = torch.ones(2, requires_grad=True)
    x = Length(a, unit=2.0)
    (x + x).unwrap("number").sum().backward()
    assert not x.number.requires_grad and not x.to_unit(1.0).number.requires_grad
