"""`materialize()` of values that hold no tensor with a gradient: its gradient is plain, as that of any op on them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import desugar
from subclasses import Outer, TensorSubclass, inner


class Fixed(TensorSubclass, fallback="materialize"):
    """Numbers in 256ths."""

    raw: Tensor = inner(dtype=torch.int16)

    @staticmethod
    def outer(raw):
        return Outer(raw.shape, dtype=torch.float32)

    def materialize(self):
        return self.raw.float() / 256


@Fixed.implements(torch.ops.aten.mul.Tensor)
def multiply(func, x, y):
    x, y = (t.materialize() if isinstance(t, Fixed) else t for t in (x, y))
    return Fixed((x * y * 256).round().to(torch.int16))


DOORS = {
    "eager": lambda fn: fn,
    "stock": lambda fn: torch.compile(fn, backend="aot_eager", fullgraph=True),
    "backend": lambda fn: torch.compile(fn, backend="desugar", options={"backend": "eager"}, fullgraph=True),
    "desugar.compile": lambda fn: desugar.compile(fn, backend="eager", strict=True, fullgraph=True),
}
doors = pytest.mark.parametrize("door", DOORS)


def make(size=2):
    return Fixed((torch.arange(1, size + 1) * 256).short()).requires_grad_()


@pytest.mark.sweep(2)
@doors
@pytest.mark.parametrize("size", [0, 1, 3])
def test_a_leaf_gets_a_gradient(door, size):
    x, y = make(size), torch.randn(size, requires_grad=True)
    compiled = DOORS[door](lambda x, y: (x.materialize().exp() * y).sum())
    for _ in range(2):
        x.grad = y.grad = None
        compiled(x, y).backward()
        torch.testing.assert_close(x.grad, x.detach().materialize().exp() * y.detach())
        torch.testing.assert_close(y.grad, x.detach().materialize().exp())


def test_what_a_rule_made_leads_it_on():
    x, y = make(), torch.tensor([2.0, 3.0], requires_grad=True)
    (x * y).materialize().sum().backward()
    assert (x.grad.tolist(), y.grad.tolist()) == ([2, 3], [1, 2])


@pytest.mark.sweep(3)
@doors
def test_no_gradient_where_none_is_wanted(door):
    compiled = DOORS[door](lambda x: x.materialize())
    assert compiled(make()).requires_grad
    assert not compiled(make().detach()).requires_grad
    with torch.no_grad():
        assert not compiled(make()).requires_grad
    with torch.inference_mode():
        assert not compiled(make()).requires_grad


def test_a_second_derivative():
    x = make()
    (grad,) = torch.autograd.grad(x.materialize().pow(3).sum(), x, create_graph=True)
    assert grad.tolist() == [3, 12]
    assert torch.autograd.grad(grad.sum(), x)[0].tolist() == [6, 12]


def test_a_value_from_outside_of_a_transform():
    x, batch = make(), torch.arange(6.0).reshape(3, 2)
    found = torch.vmap(lambda t: (t * x.materialize()).sum())(batch)
    assert found.tolist() == (batch * torch.tensor([1.0, 2.0])).sum(1).tolist()
    assert torch.func.grad(lambda t: (t * x.materialize()).sum())(batch[1]).tolist() == [1, 2]
