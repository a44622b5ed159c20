"""Values that an op made anew (zeros like another), and what is written to them, in eager mode and compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import desugar
from subclasses import TensorSubclass, inner

aten = torch.ops.aten


class Pair(TensorSubclass, fallback="map"):
    """Two tensors, whose product is a function of both."""

    a: Tensor = inner(differentiable=True)
    b: Tensor = inner(differentiable=True)


@Pair.implements(aten.mul)
def _(func, x, y):
    return Pair(x.a * y.a, x.b * y.b + x.a)


@Pair.implements(aten.add)
def _(func, x, y, alpha=1):
    return Pair(x.a + alpha * y.a, x.b + alpha * y.b)


def zeros_like(x):
    return torch.zeros_like(x)


def new_zeros(x):
    return x.new_zeros(x.shape)


def made_by_hand(x):
    return Pair(torch.zeros(x.shape), torch.zeros(x.shape))


def added(t, x):
    t += x * x
    return t


def added_twice(t, x):
    return t.add_(x).add_(x * x, alpha=2)


def first_row(t, x):
    t[0] = (x * x)[0]
    return t


def each_row(t, x):
    for i in range(x.shape[0]):
        t[i] += (x * x)[i]
    return t


def copied(t, x):
    return t.copy_(x * x)


EXPECTED = {
    added: lambda a, b: (a * a, b * b + a),
    added_twice: lambda a, b: (a + 2 * a * a, b + 2 * (b * b + a)),
    first_row: lambda a, b: (a * a * torch.eye(3)[0], (b * b + a) * torch.eye(3)[0]),
    each_row: lambda a, b: (a * a, b * b + a),
    copied: lambda a, b: (a * a, b * b + a),
}


def loss(a, b):
    return a.sin().sum() + b.cos().sum()


@pytest.mark.sweep(42)
@pytest.mark.parametrize("door", ["eager", "stock", "desugar"])
@pytest.mark.parametrize("made", [zeros_like, new_zeros, made_by_hand])
@pytest.mark.parametrize("write", EXPECTED)
def test_gradients_of_what_is_written(write, made, door):
    def f(a, b):
        x = Pair(a, b)
        t = write(made(x), x)
        return loss(t.a, t.b)

    compiled = {
        "eager": lambda g: g,
        "stock": lambda g: torch.compile(g, backend="aot_eager"),
        "desugar": lambda g: desugar.compile(g, backend="eager"),
    }[door](f)
    leaves = [torch.randn(3, requires_grad=True) for _ in "ab"]
    expected = loss(*EXPECTED[write](*leaves))
    found = compiled(*leaves)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves))


@pytest.mark.parametrize("made", [zeros_like, new_zeros])
def test_a_new_value_has_no_derivative(made):
    leaves = [torch.randn(3, requires_grad=True) for _ in "ab"]
    t = made(Pair(*leaves))
    assert not t.a.requires_grad
    assert not (t * t).b.requires_grad


def test_what_a_rule_may_write_to():
    class Writing(TensorSubclass, fallback="map"):
        a: Tensor = inner(differentiable=True)

    @Writing.implements(aten.mul)
    def _(func, x, y):
        t = Writing(2 * x.a)
        t.add_(y)
        return t

    a = torch.ones(3, requires_grad=True)
    x = Writing(a)
    (x * x).a.square().sum().backward()
    assert torch.equal(a.grad, torch.full((3,), 18.0))


def test_what_a_rule_writes_to_plain_tensors_that_it_makes():
    class Filling(TensorSubclass, fallback="map"):
        a: Tensor = inner(differentiable=True)

    @Filling.implements(aten.mul)
    def _(func, x, y):
        t = torch.zeros_like(x.a)
        t[:2] = x.a[:2] * y.a[:2]
        t.index_add_(0, torch.tensor([2]), x.a[2:].sin())
        return Filling(t)

    a = torch.randn(3, requires_grad=True)
    (g,) = torch.autograd.grad((Filling(a) * Filling(a)).a.sum(), a)
    torch.testing.assert_close(g, torch.cat([2 * a[:2], a[2:].cos()]).detach())
