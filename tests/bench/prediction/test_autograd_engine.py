"""The autograd engine in Python computes the same gradients as PyTorch's engine, on the CPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bench.prediction.autograd_engine import grad, note_materializing


class Scaled(torch.autograd.Function):
    """Has a constant among its arguments, two results, and a gradient that is None."""

    @staticmethod
    def forward(ctx, x, factor, w):
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        return x * w * factor, x + 1

    @staticmethod
    def backward(ctx, g, h):
        x, w = ctx.saved_tensors
        return g * w * ctx.factor + h, None, (g * x * ctx.factor).sum(0)


class Lazy(torch.autograd.Function):
    """Gets None for a result whose gradient is missing."""

    @staticmethod
    def forward(ctx, x):
        note_materializing(ctx, False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, g, h):
        return g * 2 if h is None else g * 2 + h * 3


def leaves():
    torch.manual_seed(0)
    return torch.randn(5, 4, requires_grad=True), torch.randn(4, requires_grad=True)


def shared(x, w):
    y = x * w
    return (y * y + y.softmax(-1)).sum() + F.layer_norm(y, (4,), w).sum()


def splits(x, w):
    first, second = x.split([2, 3])
    return (first * w).sum() + second.exp().sum()


MODEL = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))


def of_a_sum(fn):
    return lambda grad, x, w: grad(fn(x, w), (x, w))


def of_what_is_no_leaf(grad, x, w):
    y = x * w
    return grad((y * y).sum(), (y, x))


def second(grad, x, w):
    (first,) = grad((x**3).sum(), x, create_graph=True)
    return grad(first.sum(), x)


@pytest.mark.parametrize(
    "gradients",
    [
        of_a_sum(lambda x, w: ((x + w) * w).sum()),  # broadcast
        of_a_sum(lambda x, w: Scaled.apply(x, 3.0, w)[0].square().sum()),
        of_a_sum(lambda x, w: (Lazy.apply(x)[0] * w).sum()),  # a gradient is missing
        of_a_sum(lambda x, w: (x.double() * w).sum()),  # another dtype
        of_a_sum(shared),
        of_a_sum(splits),
        lambda grad, x, w: grad([MODEL(x)], [x, *MODEL.parameters()], [torch.linspace(-1, 1, 15).view(5, 3)]),
        of_what_is_no_leaf,
        second,
    ],
)
def test_gradients_are_those_of_pytorch(gradients):
    for found, wanted in zip(*(gradients(by, *leaves()) for by in (grad, torch.autograd.grad)), strict=True):
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted)


def test_what_is_refused():
    x, w = leaves()
    with pytest.raises(RuntimeError, match="allow_unused=True"):
        grad(x.sum(), (x, w))
    assert grad(x.sum(), (x, w), allow_unused=True)[1] is None
    with pytest.raises(NotImplementedError, match="is_grads_batched"):
        grad(x.sum(), x, is_grads_batched=True)
