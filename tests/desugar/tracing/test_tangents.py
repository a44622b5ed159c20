"""Tangents of results that hold integers alone: plain, so that the formula of the op goes on from there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import desugar
from subclasses import Outer, TensorSubclass, inner


class Fixed(TensorSubclass, fallback="views"):
    """Numbers in 256ths."""

    raw: Tensor = inner(dtype=torch.int16)

    @staticmethod
    def outer(raw):
        return Outer(raw.shape, stride=raw.stride(), storage_offset=raw.storage_offset(), dtype=torch.float32)

    def materialize(self):
        return self.raw.float() / 256


@Fixed.implements(torch.ops.aten.mul.Tensor)
def multiply(func, x, y):
    x, y = (t.materialize() if isinstance(t, Fixed) else t for t in (x, y))
    return Fixed((x * y * 256).round().to(torch.int16))


DOORS = {
    "backend": lambda fn, **options: torch.compile(
        fn, backend="desugar", options={"backend": "eager"}, **options
    ),
    "desugar.compile": lambda fn, **options: desugar.compile(fn, backend="eager", strict=True, **options),
}
doors = pytest.mark.parametrize("door", DOORS)


def product(x, y):
    return x * y, y.sin()


def make(size):
    return Fixed((torch.arange(size) * 256).short()), torch.randn(size).round().requires_grad_()


@pytest.mark.sweep(12)
@doors
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("wanted", [[0, 1], [0], [1]], ids=str)
def test_the_gradient_is_that_of_eager_mode(door, dynamic, wanted):
    compiled = DOORS[door](product, dynamic=dynamic)
    for size in (2, 3, 0, 1):
        x, y = make(size)
        found, expected, given = compiled(x, y), product(x, y), [torch.randn(size) for _ in wanted]
        assert type(found[0]) is Fixed and found[0].raw.equal(expected[0].raw) and found[0].requires_grad
        grads = [torch.autograd.grad([out[n] for n in wanted], y, given) for out in (found, expected)]
        torch.testing.assert_close(*grads)


@doors
def test_without_gradients_there_is_none(door):
    x, y = make(3)
    compiled = DOORS[door](product)
    with torch.no_grad():
        assert not compiled(x, y)[0].requires_grad
    assert compiled(x, y)[0].requires_grad
    assert not compiled(x, y.detach())[0].requires_grad


@pytest.mark.slow
@doors
def test_a_second_derivative(door):
    x, y = make(3)
    weights = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    sides = []
    for fn in (DOORS[door](product), product):
        (grad,) = torch.autograd.grad(fn(x, y)[0], y, weights, create_graph=True)
        sides.append([grad.detach(), torch.autograd.grad(grad.sum(), weights)[0]])
    torch.testing.assert_close(*sides)
