"""Transforms of ``torch.func`` that differentiate, beside values of a structure with rules."""

from __future__ import annotations

import pytest
import torch

from subclasses import DispatchError
from tests.subclasses.subjects import declare

aten = torch.ops.aten


def product(func, x, y):
    value, plain = (x, y) if isinstance(x, Squaring) else (y, x)
    return Squaring(value.held * plain**2)


# Its product is another than PyTorch's formula is about.
Squaring = declare(
    rules={
        aten.mul.Tensor: product,
        aten.sum: lambda func, x, *args: func(x.held, *args),
        aten.gt: lambda func, x, y: func(x.held, y),
    }
)

TRANSFORMS = {
    "grad": lambda f, t: torch.func.grad(f)(t),
    "vjp": lambda f, t: torch.func.vjp(f, t)[1](torch.ones(())),
    "jvp": lambda f, t: torch.func.jvp(f, (t,), (torch.ones_like(t),)),
    "jvp of a batch": lambda f, t: torch.func.jvp(
        lambda t: torch.vmap(f)(t[None]).sum(), (t,), (torch.ones_like(t),)
    ),
    "jacrev": lambda f, t: torch.func.jacrev(f)(t),
    "a batch of gradients": lambda f, t: torch.vmap(torch.func.grad(f))(t[None]),
    "a gradient of a batch": lambda f, t: torch.func.grad(lambda t: torch.vmap(f)(t[None]).sum())(t),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("order", ["x * t", "t * x"])
def test_an_op_beside_what_is_differentiated_is_refused(name, order):
    x, t = Squaring(torch.tensor([1.0, 2.0])), torch.tensor([3.0, 4.0])
    with pytest.raises(
        DispatchError, match=r"transform of torch\.func .*torch\.autograd\.grad, or compute with"
    ):
        TRANSFORMS[name](lambda t: (x * t if order == "x * t" else t * x).sum(), t)
    by_inner = TRANSFORMS["grad"](lambda t: (x.unwrap("held") * t**2).sum(), t)
    leaf = t.clone().requires_grad_()
    torch.testing.assert_close(by_inner, *torch.autograd.grad((x * leaf).sum(), leaf))


def test_a_batch_without_derivatives_runs_the_rule():
    x = Squaring(torch.tensor([1.0, 2.0]))
    got = torch.vmap(lambda t: (x * t).sum())(torch.tensor([[3.0, 4.0], [1.0, 1.0]]))
    assert got.tolist() == [9 + 32, 3]


WITHOUT = {
    "a comparison": lambda x, t: (t * (x.unwrap("held") * 0 + (x > t))).sum(),
    "a size": lambda x, t: t.expand_as(x).sum(),
    "a detached operand": lambda x, t: (t * (x * t.detach()).sum()).sum(),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_what_has_no_derivative_is_not_refused(name):
    x, t = Squaring(torch.tensor([1.0, 8.0])), torch.tensor([3.0, 4.0])
    leaf = t.clone().requires_grad_()
    expected = torch.autograd.grad(WITHOUT[name](x, leaf), leaf)
    torch.testing.assert_close(torch.func.grad(lambda t: WITHOUT[name](x, t))(t), *expected)
