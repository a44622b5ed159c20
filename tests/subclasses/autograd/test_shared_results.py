"""A rule for a composite op runs above autograd: what it returns is no view, and a write to it loses a gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from subclasses import TensorSubclass, inner
from tests.subclasses.subjects import MODES

aten = torch.ops.aten


class Depth(TensorSubclass):
    depth: Tensor = inner(differentiable=True)


@Depth.implements(aten.reshape, aten.narrow, aten.chunk, aten.split)
def _(func, x, *args):
    found = func(x.depth, *args)
    return [Depth(t) for t in found] if isinstance(found, list | tuple) else Depth(found)


@Depth.implements(aten.mul)
def _(func, x, y):
    return Depth(func(x.depth, y))


PARTS = {
    "reshape": lambda x: x.reshape(2, 2),
    "narrow": lambda x: x.narrow(0, 1, 2),
    "chunk": lambda x: x.chunk(2)[1],
    "split": lambda x: x.split(2)[1],
    "split by sizes": lambda x: x.split([1, 3])[1],
    "twice": lambda x: x.reshape(2, 2).reshape(4).narrow(0, 1, 2),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("part", PARTS)
def test_a_write_that_loses_a_gradient_is_an_error(part, mode):
    def write(x):
        y = x * 1
        PARTS[part](y).mul_(3)
        return y

    x = Depth(torch.ones(4, requires_grad=True))
    words = "PyTorch differentiates a view" if part == "split" else "is a view and is being modified inplace"
    with pytest.raises(RuntimeError, match=words):
        MODES[mode](write)(x)


@pytest.mark.parametrize("part", PARTS)
def test_without_gradients_the_value_is_written(part):
    x, plain = Depth(torch.ones(4)), torch.ones(4)
    PARTS[part](x).mul_(3)
    PARTS[part](plain).mul_(3)
    assert x.depth.equal(plain)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("part", [part for part in PARTS if part != "split"])  # a view, by a rule
@pytest.mark.parametrize("is_leaf", [False, True])
def test_derivatives(part, mode, is_leaf):
    values, plain = torch.arange(1.0, 5, requires_grad=not is_leaf), torch.arange(1.0, 5, requires_grad=True)
    x = Depth(values)
    if is_leaf:
        x.requires_grad_()
    found = MODES[mode](lambda x: PARTS[part](x * 1) * 3)(x).depth.square().sum()
    (gradient,) = torch.autograd.grad(found, x if is_leaf else values)
    (expected,) = torch.autograd.grad((PARTS[part](plain * 1) * 3).square().sum(), plain)
    torch.testing.assert_close(gradient.depth if is_leaf else gradient, expected)
