"""Tangents of results that hold integers alone, and autograd functions whose gradients are not linear in theirs."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import desugar
from desugar import DesugarError
from subclasses import Outer, TensorSubclass, inner
from tests.desugar.classes import TwoTensor
from tests.desugar.judge import backward, judge
from tests.doors import by_desugar, by_torch


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


# ---- autograd functions whose gradients are not linear in those that arrive ----------------------------------


class WithLoss(torch.autograd.Function):
    """Brings a loss in on the side."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.save_for_backward(loss)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (loss,) = ctx.saved_tensors
        return gradient, torch.full_like(loss, 0.5)


def one(x, w):
    return WithLoss.apply(x, (w * w).sum())


def two(x, w):
    return WithLoss.apply(x * 2, (w * w).sum()), w + 1


def three(x, w):
    return WithLoss.apply(x * 2, (w * w).sum()), x + w, torch.stack([w * 3, x])


class Several(torch.autograd.Function):
    """Looks which gradients are there."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 1, x * 2

    @staticmethod
    def backward(ctx, first, second):
        if first is None or second is None:
            return (second if first is None else first) * 7
        return first + second


class Exponential(torch.autograd.Function):
    """Gives something for a gradient of zeros."""

    @staticmethod
    def forward(ctx, x):
        return x * 1, x * 2

    @staticmethod
    def backward(ctx, first, second):
        return first.exp() + second.exp() * 3


def several(x, w):
    one, other = Several.apply(x)
    return one, w + other


def exponential(x, w):
    return *Exponential.apply(x), w + x


def plain():
    return torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)


def wrapped():
    return tuple(TwoTensor(torch.rand(3), torch.rand(3)).requires_grad_() for _ in range(2))


@pytest.mark.sweep(12)
@pytest.mark.parametrize(("compile", "make"), [(by_desugar, plain), (by_desugar, wrapped), (by_torch, plain)])
@pytest.mark.parametrize("fn", [one, two, three, several, exponential])
def test_whatever_gradients_arrive(fn, compile, make):
    if fn is several:
        pytest.skip("Dynamo runs its backward with all gradients before it asks a backend")
    compiled, count = compile(fn), 1 if fn is one else len(fn(*make()))
    for missing in itertools.product((True, False), repeat=count):
        judge(fn, make, compiled, missing=[n for n in range(count) if missing[n]])


def test_with_random_numbers_it_is_refused():
    drop = desugar.compile(lambda x, w: two(torch.dropout(x, 0.5, True), w), backend="eager")
    backward(drop(*plain()))
    with pytest.raises(DesugarError, match="run the function again"):
        backward(drop(*plain()), missing=[1])
