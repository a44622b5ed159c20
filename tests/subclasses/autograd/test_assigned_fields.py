"""Assigning a field: of a leaf, and of a value without gradients; a value that autograd recorded is refused."""

from __future__ import annotations

import pytest
import torch
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


@pytest.mark.parametrize("cls", [Mean, Trained, Ruled])
@pytest.mark.parametrize("made", [lambda x: x, lambda x: x.clone(), lambda x: x[:1]])
def test_a_value_that_autograd_recorded_is_refused(made, cls):
    x = made(cls(torch.ones(2, requires_grad=True) * 3, torch.ones(2)))
    if isinstance(x, cls):
        with pytest.raises(DispatchError, match=r"construct a new \w+ of its inner tensors.*x\.detach\(\)"):
            x.count = torch.ones(2)
        assert x.detach().count.tolist() == [1, 1]


@pytest.mark.parametrize("cls", [Mean, Trained])
def test_a_value_without_gradients_that_a_backward_needs(cls):
    w, x = torch.ones(2, requires_grad=True), cls(torch.ones(2), torch.ones(2))
    before = (x * w).sum()
    x.count = torch.full((2,), 5.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()


DOORS = {
    "desugar": lambda f: desugar.compile(f, backend="eager"),
    "stock": lambda f: torch.compile(f, backend="aot_eager"),
}


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
