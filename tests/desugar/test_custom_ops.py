"""Custom ops with a registered autograd formula, and custom `autograd.Function`s, on and beside subclasses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.desugar.classes import Pair, make
from tests.desugar.judge import by_dynamo, by_pass, judge


@torch.library.custom_op("desugar_tests::cubed", mutates_args=())
def cubed(x: Tensor) -> Tensor:
    return x * x * x


@cubed.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


# Not the true derivative, so that a test sees whose formula ran.
cubed.register_autograd(lambda ctx, g: g * ctx.saved_tensors[0] * 7, setup_context=_keep)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 5  # nor this


PROGRAMS = {
    "a custom op on an inner tensor": lambda x, y: cubed(x.unwrap("a")).sum() + cubed(y),
    "a custom op beside one": lambda x, y: x * cubed(y),
    "a function on one": lambda x, y: Doubled.apply(x) * y,
    "a function beside one": lambda x, y: x * Doubled.apply(y),
}


@pytest.mark.parametrize("way", [by_pass, by_dynamo])
@pytest.mark.parametrize("name", PROGRAMS)
def test_their_own_formulas_are_used(name, way):
    def make_arguments():
        return make(Pair, 3, 4, grad=True), torch.randn(4, requires_grad=True)

    judge(PROGRAMS[name], make_arguments, way=way, calls=2)


def test_the_formula_is_the_registered_one():
    y = torch.full((3,), 2.0, requires_grad=True)
    by_pass(lambda y: cubed(y))(y).sum().backward()
    assert y.grad.tolist() == [14.0] * 3


def test_through_inductor():
    y = torch.full((3,), 2.0, requires_grad=True)
    out = by_pass(lambda y: cubed(y) + 1, backend="inductor")(y)
    out.sum().backward()
    assert out.tolist() == [9.0] * 3 and y.grad.tolist() == [14.0] * 3
