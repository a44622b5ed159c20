"""Gradients of Parameters that are wrappers: memory of their own, and strides that fused kernels take."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import desugar
from subclasses import TensorSubclass, inner
from tests.subclasses.subjects import LowRank


class Sum(TensorSubclass, fallback="materialize", trainable=True):
    a: Tensor = inner()
    b: Tensor = inner()

    def materialize(self):
        return self.a + self.b


class Mapped(TensorSubclass, fallback="map"):
    a: Tensor = inner(differentiable=True)
    b: Tensor = inner(differentiable=True)


class Einsum(LowRank, trainable=True):
    """Its rule gives gradients of other strides."""


@Einsum.implements(F.linear)
def _(func, x, w, bias=None):
    left, right = w.unwrap()
    return torch.einsum("bi,ri,or->bo", x, right, left)


X = torch.tensor([1.0, 2.0])
LOSSES = {
    "the whole": lambda p, a, b: (p * X).sum() if a is None else ((a + b) * X).sum(),
    "parts": lambda p, a, b: ((parts := p.unwrap() if a is None else (a, b))[0] * X + parts[1] * X).sum(),
    "one sum": lambda p, a, b: (sum(p.unwrap() if a is None else (a, b)) * X).sum(),
    "expanded": lambda p, a, b: sum(t.sum() for t in (p.unwrap() if a is None else (a, b))),
    "mixed": lambda p, a, b: (
        ((p * X).sum() + p.unwrap()[0].sum()) if a is None else ((a + b) * X).sum() + a.sum()
    ),
}
DOORS = {
    "eager": lambda fn: fn,
    "stock": lambda fn: torch.compile(fn, backend="aot_eager"),
    "desugar.compile": lambda fn: desugar.compile(fn, backend="eager"),
    "backend": lambda fn: torch.compile(fn, backend="desugar", options={"backend": "eager"}),
}


def assert_same(p, a, b):
    torch.testing.assert_close(p.grad.a, a.grad)
    torch.testing.assert_close(p.grad.b, b.grad)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", LOSSES)
def test_accumulation_and_clipping(name, door):
    p = nn.Parameter(Sum(torch.zeros(2), torch.zeros(2)))
    a, b = (torch.zeros(2, requires_grad=True) for _ in range(2))
    loss = DOORS[door](lambda p: LOSSES[name](p, None, None))
    for _ in range(3):
        loss(p).backward()
        LOSSES[name](None, a, b).backward()
        assert_same(p, a, b)
    nn.utils.clip_grad_norm_([p], 1.0)
    nn.utils.clip_grad_norm_([a, b], 1.0)
    assert_same(p, a, b)
    p.grad.mul_(3)
    for t in (a, b):
        t.grad.mul_(3)
    assert_same(p, a, b)


@pytest.mark.parametrize("cls", [Sum, Mapped])
def test_two_parameters_with_one_gradient(cls):
    p, q = (nn.Parameter(cls(torch.zeros(2), torch.zeros(2))) for _ in range(2))
    plain = torch.zeros(2, requires_grad=True)
    for _ in range(2):
        ((p.unwrap()[0] + q.unwrap()[0] + plain) * X).sum().backward()
    for grad in (p.grad.a, q.grad.a, plain.grad):
        assert grad.equal(2 * X)
    p.grad.zero_()
    assert q.grad.a.equal(2 * X) and plain.grad.equal(2 * X)


def test_the_callers_gradient_stays_as_it_is():
    p, g = nn.Parameter(Sum(torch.zeros(2), torch.zeros(2))), torch.ones(2)
    for _ in range(2):
        torch.autograd.backward([p.unwrap()[0]], [g])
    assert g.equal(torch.ones(2)) and p.grad.a.equal(torch.full((2,), 2.0))


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_gradients_of_other_strides(optimizer, options):
    torch.manual_seed(0)
    left, right, x = torch.randn(8, 2), torch.randn(2, 6), torch.randn(5, 6)
    p = nn.Parameter(Einsum(left.clone(), right.clone()))
    a, b = (nn.Parameter(t.clone()) for t in (left, right))
    made = getattr(torch.optim, optimizer)
    ours, plain = made([p], lr=0.1, **options), made([a, b], lr=0.1, **options)
    for _ in range(3):
        F.linear(x, p).square().mean().backward()
        torch.einsum("bi,ri,or->bo", x, b, a).square().mean().backward()
        assert p.grad.left.stride() != p.left.stride()  # what the test is about
        for one in (ours, plain):
            one.step()
            one.zero_grad()
    torch.testing.assert_close(p.left, a.data)
    torch.testing.assert_close(p.right, b.data)
