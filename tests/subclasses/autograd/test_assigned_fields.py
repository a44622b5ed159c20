"""Assigning a field: of a leaf, and of a value without gradients; a value that autograd recorded is refused."""

from __future__ import annotations

import pytest
import torch

from subclasses import DispatchError, TensorSubclass, inner
from tests.doors import DOORS
from tests.subclasses.subjects import declare

aten = torch.ops.aten


Mean = declare(
    name="Mean",
    keywords={"fallback": "materialize"},
    total=inner(differentiable=True),
    count=inner(),
    materialize=lambda self: self.total / self.count,
)
Trained = declare(Mean, keywords={"trainable": True})
Ruled = declare(Mean, rules={aten.mul: lambda func, x, y: Ruled(x.total * y, x.count)})
Twin = declare(
    keywords={"fallback": "map"}, total=inner(differentiable=True), count=inner(differentiable=True)
)
ONES, FIVES = torch.ones(2), torch.full((2,), 5.0)


def recorded(cls):
    return cls(torch.ones(2, requires_grad=True) * 1, torch.ones(2))


@pytest.mark.parametrize("cls", [Mean, Trained, Ruled])
@pytest.mark.parametrize("made", [lambda x: x, lambda x: x.clone(), lambda x: x[:1]])
def test_a_value_that_autograd_recorded_is_refused(made, cls):
    x = made(recorded(cls))
    if isinstance(x, cls):
        with pytest.raises(DispatchError, match=r"construct a new \w+ of its inner tensors.*x\.detach\(\)"):
            x.count = ONES
        assert x.detach().count.tolist() == [1, 1]


@pytest.mark.parametrize("cls", [Mean, Trained])
def test_a_value_without_gradients_that_a_backward_needs(cls):
    x = cls(ONES, ONES)
    before = (x * torch.ones(2, requires_grad=True)).sum()
    x.count = FIVES
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()


def test_a_leaf_stays_one():
    p = torch.nn.Parameter(Trained(torch.ones(2), torch.ones(2)))
    p.count = FIVES
    assert p.is_leaf and p.grad_fn is None
    (p * 1).sum().backward()
    torch.testing.assert_close(p.grad.total, torch.full((2,), 0.2))


def parts(x):
    return list(x.unwrap()) if isinstance(x, TensorSubclass) else [x]


@pytest.mark.sweep(12)
@pytest.mark.parametrize("door", ["stock", "desugar"])
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
        torch.testing.assert_close((parts(found), x.total), (parts(expected), y.total))


@pytest.mark.parametrize("door", ["stock", "desugar"])
def test_a_whole_graph_is_refused(door):
    def f(x):
        x.total = x.total * 2
        return x * 1

    with pytest.raises(Exception, match=r"Mean\.total = \.\.\."):
        DOORS[door](f, fullgraph=True)(Mean(torch.ones(2), torch.ones(2)))


@pytest.mark.parametrize("cls", [Mean, Trained, Ruled])
def test_without_gradients_it_is_not_recorded(cls):
    """As a write to a plain tensor is not."""
    x = recorded(cls)
    node, version = x.grad_fn, x._version
    with torch.no_grad():
        x.count = FIVES
    assert x.grad_fn is node and x._version == version
    torch.testing.assert_close(x.detach().materialize(), torch.full((2,), 0.2))
