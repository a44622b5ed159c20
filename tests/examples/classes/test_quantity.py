"""Quantities: values and gradients are those of the plain values, units are those of the formula."""

from __future__ import annotations

import copy

import pytest
import torch

from classes import quantity as example
from classes.quantity import Quantity, UnitError
from subclasses import DispatchError
from subclasses.testing import suite
from tests.examples.classes.checks import check_gradients, converted, refused
from tests.tables import giving

aten = torch.ops.aten


def make(rows=4, **unit):
    return Quantity.of(torch.randn(rows, 6), **(unit or {"m": 1}))


COMPARISONS = (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge)

TestQuantity = suite(
    make,
    reference=lambda x: x.value,
    ops={
        torch.pow: lambda x: (x, 3),
        torch.reciprocal: lambda x: (x,),
        aten.permute: lambda x: (x, [1, 0]),
        aten.squeeze: lambda x: (x[:1], 0),
        **{op: lambda x: (x, x[:1]) for op in (aten.sub, aten.rsub, *COMPARISONS)},
    },
    sizes=[lambda n=n: make(n) for n in (5, 7)],
    variants=[lambda: make(s=2), lambda: make(kg=1, m=-1)],
)
TestWithoutUnit = suite(lambda: Quantity(torch.randn(4, 6)), reference=lambda x: x.value, paths={})


def formula(length, time):
    speed = length / time
    return (0.5 * speed**2 + speed * speed[0]).sum(0).mean() - 2 * (1 / time**2)[0, 0] * length[0, 0] ** 2


@pytest.mark.sweep(3)
def test_values_gradients_and_units(way):
    plain = [torch.rand(4, 6, dtype=torch.float64).add_(1).requires_grad_() for _ in range(2)]
    got = way(formula)(Quantity.of(plain[0], m=1), Quantity.of(plain[1], s=1))
    assert got.unit == (("m", 2), ("s", -2))
    expected = formula(*plain)
    check_gradients(got.value, expected, plain, torch.sum)


@pytest.mark.sweep(2)
def test_a_broadcast_sum_and_views_get_their_gradients(way):
    plain = [torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)]

    def function(x, y):
        z = x + y - y.expand(4, 6) * 3
        return (z[1:].t().reshape(-1)[::2] * -z[0, 0]).sum() * 1.0

    got, expected = way(function)(*(Quantity.of(p, m=1) for p in plain)).value, function(*plain)
    check_gradients(got, expected, plain, torch.sum)


@pytest.mark.sweep(3)
def test_a_unit_that_does_not_fit_is_an_error(way):
    x, y = make(m=1), make(s=1)
    sums = (torch.add, torch.sub, torch.lt, lambda x, y: x + 1, lambda x, y: 1 - x, lambda x, y: x > 0)
    for wrong in sums:
        with pytest.raises(Exception, match=r"m and (s|no unit) in one sum or comparison"):
            way(wrong)(x, y)


SPEED = Quantity.of(torch.ones(2), s=-1, m=1, kg=0)

test_units_are_sorted_and_cancel = giving(
    {
        "sorted": (lambda: SPEED.unit, (("m", 1), ("s", -1))),
        "a quotient": (lambda: (SPEED / SPEED).unit, ()),
        "a power of 0": (lambda: (SPEED**0).unit, ()),
        "an inverse": (lambda: (1 / SPEED).unit, (("m", -1), ("s", 1))),
        "a product": (lambda: (SPEED.view(1, 2) @ SPEED).unit, (("m", 2), ("s", -2))),
        "a number without unit": (lambda: (SPEED / SPEED + 1).value.tolist(), [2, 2]),
        "a number first": (lambda: (1 + SPEED / SPEED).value.tolist(), [2, 2]),
        "shown": (lambda: example.show((SPEED * SPEED).unit), "m^2 s^-2"),
    }
)


def test_in_place():
    x, y = make(), make()
    expected = x.value + y.value * 2
    kept = x
    x += y
    x.add_(y)
    assert x is kept
    torch.testing.assert_close(x.value, expected)
    x[0] = y[1]
    torch.testing.assert_close(x.value[0], y.value[1])


PLAIN = torch.zeros(4, 6)
test_what_is_refused = refused(
    [make],
    {
        "another unit, in place": (
            UnitError,
            "in one sum or comparison",
            [
                lambda x: x.add_(1),
                lambda x: x.copy_(PLAIN),
                lambda x: x.copy_(make(s=1)),
                lambda x: x.__setitem__(0, PLAIN[0]),
            ],
        ),
        "writes": (
            NotImplementedError,
            None,
            [lambda x: x.mul_(x), lambda x: x.zero_(), lambda x: x.fill_(1), lambda x: PLAIN.add_(x)],
        ),
        "ops without a rule": (
            DispatchError,
            "Quantity has no rule for aten",
            [lambda x: x.exp(), lambda x: x.sqrt(), lambda x: x.cumprod(0), lambda x: x.softmax(0)],
        ),
        "powers": (NotImplementedError, None, [lambda x: x**0.5, lambda x: 2**x, lambda x: x**x]),
    },
)
test_conversions_and_copies_keep_the_unit = converted(
    [make],
    [torch.bfloat16, torch.float64],
    lambda x: [copy.deepcopy(x), 2 * x, x / 2, x.sum(0), x[:0].sum(0), x[:1, :1].mean()],
)


def test_gradients_of_what_was_written_to():
    x, y = (torch.randn(3, 2, requires_grad=True) for _ in range(2))
    got = Quantity.of(x, m=1) * 1
    got[0] = Quantity.of(y, m=1)[1]
    got += Quantity.of(y, m=1)
    expected = torch.cat([y[1:2] + y[:1], (x + y)[1:]])
    options = {"leaves": (x, y), "loss": lambda v: v.pow(3).sum() + v.detach().sum()}
    first = got.value * 1
    got[0] = Quantity.of(y, m=1)[1]
    check_gradients(first, expected, **options)
    check_gradients(got.value, torch.cat([y[1:2], (x + y)[1:]]), **options)


def test_a_leaf_gets_a_gradient_with_its_unit():
    x = make().requires_grad_()
    x.value.sum().backward()
    assert isinstance(x.grad, Quantity) and x.grad.unit == x.unit and x.grad.value.eq(1).all()
