"""Gradients of Parameters that are wrappers: memory of their own, and strides that fused kernels take."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from subclasses import inner
from tests.doors import DOORS
from tests.subclasses.dispatch.training import check_trained
from tests.subclasses.subjects import LowRank, Pair, declare

Sum = declare(
    keywords={"fallback": "materialize", "trainable": True},
    a=inner(),
    b=inner(),
    materialize=lambda self: self.a + self.b,
)


def einsum(x, left, right):
    return torch.einsum("bi,ri,or->bo", x, right, left)


# Its rule gives gradients of other strides.
Einsum = declare(
    LowRank,
    keywords={"trainable": True},
    rules={F.linear: lambda func, x, w, bias=None: einsum(x, *w.unwrap())},
)

X = torch.tensor([1.0, 2.0])
# A loss of the whole and its two parts.
LOSSES = {
    "the whole": lambda p, a, b: (p * X).sum(),
    "parts": lambda p, a, b: (a * X + b * X).sum(),
    "one sum": lambda p, a, b: ((a + b) * X).sum(),
    "expanded": lambda p, a, b: a.sum() + b.sum(),
    "mixed": lambda p, a, b: (p * X).sum() + a.sum(),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", LOSSES)
def test_accumulation_and_clipping(name, door):
    p = nn.Parameter(Sum(torch.zeros(2), torch.zeros(2)))
    parts = [torch.zeros(2, requires_grad=True) for _ in range(2)]
    loss = DOORS[door](lambda p: LOSSES[name](p, *p.unwrap()))

    def check():
        torch.testing.assert_close([p.grad.a, p.grad.b], [t.grad for t in parts])

    for _ in range(3):
        loss(p).backward()
        LOSSES[name](sum(parts), *parts).backward()
        check()
    for leaves in ([p], parts):
        nn.utils.clip_grad_norm_(leaves, 1.0)
    check()
    for leaf in (p, *parts):
        leaf.grad.mul_(3)
    check()


@pytest.mark.parametrize("cls", [Sum, Pair])
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
    p, x = nn.Parameter(Einsum(torch.randn(8, 2), torch.randn(2, 6))), torch.randn(5, 6)

    def loss(p):
        p.register_post_accumulate_grad_hook(lambda p: strides.append(p.grad.left.stride()))
        return F.linear(x, p).square().mean()

    strides = []
    check_trained(p, loss, lambda *parts: einsum(x, *parts).square().mean(), optimizer, clip=False, **options)
    assert p.left.stride() not in strides  # what the test is about
