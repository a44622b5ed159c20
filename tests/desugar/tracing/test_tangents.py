"""Tangents of results that hold integers alone, and autograd functions whose gradients are not linear in theirs."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor

from desugar import DesugarError
from subclasses import Outer, TensorSubclass, inner
from tests.desugar.classes import TwoTensor, autograd_function, saving
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


DOORS = {"backend": by_torch, "desugar.compile": functools.partial(by_desugar, strict=True)}
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
    found = torch.no_grad()(compiled)(x, y), compiled(x, y), compiled(x, y.detach())
    assert [first.requires_grad for first, _ in found] == [False, True, False]


@pytest.mark.slow
@doors
def test_a_second_derivative(door):
    x, y = make(3)
    weights = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    firsts = [
        torch.autograd.grad(fn(x, y)[0], y, weights, create_graph=True)[0]
        for fn in (DOORS[door](product), product)
    ]
    torch.testing.assert_close(*firsts)
    torch.testing.assert_close(*(torch.autograd.grad(first.sum(), weights) for first in firsts))


# ---- autograd functions whose gradients are not linear in those that arrive ----------------------------------


# Brings a loss in on the side.
with_loss = autograd_function(
    lambda ctx, x, loss: saving(ctx, loss, x.clone()),
    lambda ctx, gradient: (gradient, torch.full_like(ctx.saved_tensors[0], 0.5)),
)


exponential = autograd_function(
    lambda ctx, x: (x * 1, x * 2), lambda ctx, first, second: first.exp() + second.exp() * 3
)

# Functions, and how many results each has.
FUNCTIONS = {
    "one": (lambda x, w: with_loss(x, (w * w).sum()), 1),
    "two": (lambda x, w: (with_loss(x * 2, (w * w).sum()), w + 1), 2),
    "three": (lambda x, w: (with_loss(x * 2, (w * w).sum()), x + w, torch.stack([w * 3, x])), 3),
    # Gives something for a gradient of zeros.
    "exponential": (lambda x, w: (*exponential(x), w + x), 3),
}


def plain():
    return torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)


def wrapped():
    return tuple(TwoTensor(torch.rand(3), torch.rand(3)).requires_grad_() for _ in range(2))


@pytest.mark.sweep(12)
@pytest.mark.parametrize(("compile", "make"), [(by_desugar, plain), (by_desugar, wrapped), (by_torch, plain)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_whatever_gradients_arrive(name, compile, make):
    fn, count = FUNCTIONS[name]
    compiled = compile(fn)
    for missing in itertools.product((True, False), repeat=count):
        judge(fn, make, compiled, missing=[n for n in range(count) if missing[n]])


def test_with_random_numbers_it_is_refused():
    drop = by_desugar(lambda x, w: FUNCTIONS["two"][0](torch.dropout(x, 0.5, True), w))
    backward(drop(*plain()))
    with pytest.raises(DesugarError, match="run the function again"):
        backward(drop(*plain()), missing=[1])
