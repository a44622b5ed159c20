"""Ops and rules that draw random numbers: the backward belongs to what the forward drew."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses import TensorSubclass, inner
from tests.subclasses.subjects import MODES

aten = torch.ops.aten


class Mapped(TensorSubclass, fallback="map"):
    """Has a rule, so that its ops are derived by running them again."""

    a: Tensor = inner(differentiable=True)


@Mapped.implements(aten.mul.Tensor)
def _(func, x, y):
    return Mapped(func(*(t.a if isinstance(t, Mapped) else t for t in (x, y))))


class Ruled(TensorSubclass, fallback="materialize", kind="structure"):
    """Has a rule for an op that draws random numbers."""

    a: Tensor = inner(differentiable=True)

    def materialize(self):
        return self.a * 1


@Ruled.implements(aten.native_dropout.default)
def _(func, x, p, train):
    out, mask = func(x.a, p, train)
    return Ruled(out), mask


class Rounded(TensorSubclass, fallback="error"):
    """Has a rule that draws random numbers for an op that does not."""

    a: Tensor = inner(differentiable=True)


@Rounded.implements(aten.mul.Tensor)
def _(func, x, y):
    return Rounded(func(x.a, y) * (torch.rand_like(x.a) < 0.5))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cls", [Mapped, Ruled])
def test_dropout_has_one_mask(cls, mode):
    torch.manual_seed(0)
    a = torch.ones(64, requires_grad=True)
    y = MODES[mode](lambda a: torch.native_dropout(cls(a), 0.5, True)[0].a)(a)
    y.sum().backward()
    assert torch.equal(a.grad, y.detach()) and 0 < int((y == 0).sum()) < 64


@pytest.mark.parametrize("mode", MODES)
def test_of_a_function(mode):
    torch.manual_seed(0)
    a = torch.ones(64, requires_grad=True)
    y = MODES[mode](lambda a: F.dropout(Mapped(a), 0.5).a)(a)
    y.sum().backward()
    assert torch.equal(a.grad, y.detach())


def test_a_sample_with_a_derivative():
    found = {}
    for make in (lambda a: a, lambda a: Mapped(a)):
        torch.manual_seed(0)
        a = torch.full((4,), 2.0, requires_grad=True)
        y = torch._standard_gamma(make(a))
        (y.a if isinstance(y, Mapped) else y).sum().backward()
        found[type(y)] = a.grad
    assert torch.equal(found[Tensor], found[Mapped])


def test_second_derivatives_are_of_the_same_numbers():
    torch.manual_seed(0)
    a = torch.full((64,), 3.0, requires_grad=True)
    y = torch.native_dropout(Mapped(a), 0.5, True)[0].a
    (first,) = torch.autograd.grad((y**2).sum(), a, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), a)
    kept = (y.detach() != 0) * 2.0
    assert torch.equal(first.detach(), 2 * y.detach() * kept) and torch.equal(second, 2 * kept**2)


def test_without_a_derivative():
    a = torch.ones(8, requires_grad=True)
    assert not torch.rand_like(Mapped(a)).requires_grad
    drawn = torch.bernoulli(Mapped(a * 0.5))
    (grad,) = torch.autograd.grad(drawn.a.sum(), a)
    assert torch.equal(grad, torch.zeros(8))


@pytest.mark.parametrize("mode", MODES)
def test_a_rule_may_draw(mode):
    a = torch.ones(64, requires_grad=True)
    y = MODES[mode](lambda a: (Rounded(a) * 3.0).a)(a)
    y.sum().backward()
    assert torch.equal(a.grad, y.detach()) and 0 < int((y == 0).sum()) < 64


def test_a_rule_runs_once():
    calls = []

    class Counted(TensorSubclass):
        a: Tensor = inner(differentiable=True)

    @Counted.implements(aten.mul.Tensor)
    def _(func, x, y):
        calls.append(func)
        return Counted(func(x.a, y))

    a = torch.ones(8, requires_grad=True)
    (Counted(a) * 3.0).a.square().sum().backward()
    assert torch.equal(a.grad, torch.full((8,), 18.0)) and len(calls) == 1
