"""Assigning a field of a value that autograd recorded: its gradients are by the new tensor from then on."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import desugar
from subclasses import DispatchError, TensorSubclass, inner

aten = torch.ops.aten


class Mean(TensorSubclass, fallback="materialize"):
    total: Tensor = inner(differentiable=True)
    count: Tensor = inner()

    def materialize(self):
        return self.total / self.count


class Trained(Mean, trainable=True):
    pass


class Ruled(Mean):
    """With a rule of its own."""


@Ruled.implements(aten.mul)
def _(func, x, y):
    return Ruled(x.total * y, x.count)


class Twin(TensorSubclass, fallback="map"):
    total: Tensor = inner(differentiable=True)
    count: Tensor = inner(differentiable=True)


USES = {
    "an op": lambda x: (x * 1).sum(),
    "a sum": lambda x: x.sum(),
    "linear": lambda x: F.linear(torch.ones(2), x[None]).sum(),
    "materialize": lambda x: x.materialize().sum(),
    "a field": lambda x: (x.total / x.count).sum(),
    "a copy": lambda x: (x.clone() * 1).sum(),
    "both": lambda x: (x * 1).sum() / 2 + x.materialize().sum() / 2,
}


@pytest.mark.parametrize("is_made_by_op", [False, True])
@pytest.mark.parametrize("cls", [Mean, Trained, Ruled])
@pytest.mark.parametrize("use", USES)
def test_gradients(use, cls, is_made_by_op):
    t = torch.randn(2, requires_grad=True)
    count = torch.ones(2, requires_grad=True)
    x = cls(t * 3, count)
    if is_made_by_op:
        x = x.clone()
    x.count = torch.full((2,), 5.0)
    found = USES[use](x)
    torch.testing.assert_close(found, (t * 3 / 5).sum())
    by_total, by_count = torch.autograd.grad(found, (t, count), allow_unused=True)
    torch.testing.assert_close(by_total, torch.full((2,), 0.6))
    assert by_count is None or not by_count.any()


def test_of_a_mapped_class():
    a, b = (torch.randn(2, requires_grad=True) for _ in "ab")
    x = Twin(a * 1, b * 1)
    x.count = torch.ones(2)
    y = x * 3
    assert y.count.tolist() == [3.0, 3.0]
    by_a, by_b = torch.autograd.grad(y, (a, b), torch.ones(2), allow_unused=True)
    assert by_a.tolist() == [3.0, 3.0] and (by_b is None or not by_b.any())


def test_what_was_computed_before_is_stale():
    """As after any write to what a backward needs."""
    t, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    x = Mean(t * 1, torch.ones(2))
    before = (x * w).sum()
    x.count = torch.full((2,), 5.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()


@pytest.mark.parametrize("cls", [Mean, Trained])
def test_a_value_without_gradients_that_a_backward_needs(cls):
    w, x = torch.ones(2, requires_grad=True), cls(torch.ones(2), torch.ones(2))
    before = (x * w).sum()
    x.count = torch.full((2,), 5.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()


def test_assigned_twice_and_between():
    t = torch.ones(2, requires_grad=True)
    x = Mean(t * 1, torch.ones(2))
    x.count = torch.full((2,), 5.0)
    x.count = torch.full((2,), 2.0)
    (g,) = torch.autograd.grad((x * 1).sum(), t)
    assert g.tolist() == [0.5, 0.5]


def test_the_field_that_the_gradient_came_by():
    t, count = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    x = Mean(t * 1, count * 2)
    x.total = torch.full((2,), 8.0)
    by_total, by_count = torch.autograd.grad((x * 1).sum(), (t, count), allow_unused=True)
    assert by_total is None or not by_total.any()
    torch.testing.assert_close(by_count, torch.full((2,), -8.0 / 2**2 * 2))


def test_second_derivatives():
    t = torch.full((2,), 3.0, requires_grad=True)
    x = Mean(t**3, torch.ones(2))
    x.count = torch.full((2,), 2.0)
    (g,) = torch.autograd.grad((x * 1).sum(), t, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(g.sum(), t)[0], 6 * t / 2)


def test_a_view_is_refused():
    class Viewed(TensorSubclass, fallback="map"):
        a: Tensor = inner()

    t = torch.ones(3, requires_grad=True)
    view = Viewed(t * 1)[:2]
    with pytest.raises(DispatchError, match=r"a view and requires grad.*view.clone\(\)"):
        view.a = torch.zeros(2)
    copy = view.clone()
    copy.a = torch.zeros(2)
    assert view.a.tolist() == [1.0, 1.0]


DOORS = {
    "desugar": lambda f: desugar.compile(f, backend="eager"),
    "stock": lambda f: torch.compile(f, backend="aot_eager"),
}


@pytest.mark.parametrize("door", DOORS)
def test_compiled(door):
    def f(t):
        x = Mean(t * 1, torch.ones(2))
        x.count = x.count * 5
        return (x * 1).sum()

    compiled = DOORS[door](f)
    for _ in range(2):
        t = torch.randn(2, requires_grad=True)
        found = compiled(t)
        torch.testing.assert_close(found, f(t))
        torch.testing.assert_close(torch.autograd.grad(found, t)[0], torch.full((2,), 0.2))


def test_a_leaf_stays_one():
    p = torch.nn.Parameter(Trained(torch.ones(2), torch.ones(2)))
    p.count = torch.full((2,), 5.0)
    assert p.is_leaf and p.grad_fn is None
    (p * 1).sum().backward()
    torch.testing.assert_close(p.grad.total, torch.full((2,), 0.2))


@pytest.mark.sweep(12)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("cls", [Mean, Trained, Ruled, Twin])
@pytest.mark.parametrize("read", [lambda x: x * 1, lambda x: x.total * 1, lambda x: x.unwrap("count") * 1])
def test_an_argument_compiled(read, cls, door):
    def f(x, t):
        x.total = x.total * t
        return read(x)

    compiled = DOORS[door](f)
    x, y = (cls(torch.ones(2), torch.full((2,), 2.0)) for _ in "xy")
    for _ in range(3):
        found, expected = compiled(x, 10.0), f(y, 10.0)
        for one, other in zip(parts(found), parts(expected), strict=True):
            torch.testing.assert_close(one, other)
        torch.testing.assert_close(x.total, y.total)


def parts(x):
    return x.unwrap() if isinstance(x, TensorSubclass) else (x,)


@pytest.mark.parametrize("door", DOORS)
def test_a_whole_graph_is_refused(door):
    def f(x):
        x.total = x.total * 2
        return x * 1

    compiled = {
        "desugar": lambda: desugar.compile(f, backend="eager", fullgraph=True),
        "stock": lambda: torch.compile(f, backend="aot_eager", fullgraph=True),
    }[door]()
    with pytest.raises(Exception, match=r"Mean\.total = \.\.\."):
        compiled(Mean(torch.ones(2), torch.ones(2)))


@pytest.mark.parametrize("cls", [Mean, Trained, Ruled])
def test_without_gradients_it_is_not_recorded(cls):
    """As a write to a plain tensor is not."""
    t = torch.ones(2, requires_grad=True)
    x = cls(t * 1, torch.ones(2))
    node, version = x.grad_fn, x._version
    with torch.no_grad():
        x.count = torch.full((2,), 5.0)
    assert x.grad_fn is node and x._version == version
    torch.testing.assert_close(x.detach().materialize(), torch.full((2,), 0.2))
