"""Plain operands of mapped ops: their gradients are plain, the sum over inner tensors."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import desugar
from subclasses import TensorSubclass, inner


class Wind(TensorSubclass, fallback="map"):
    east: Tensor = inner(differentiable=True)
    north: Tensor = inner(differentiable=True)


class Measured(Wind):
    """A norm by a rule, which makes a plain tensor of values."""


@Measured.implements(torch.ops.aten.linalg_vector_norm)
def _(func, x, *args):
    return func(torch.hypot(x.east, x.north), *args)


DOORS = {
    "eager": lambda f: f,
    "stock": lambda f: torch.compile(f, backend="aot_eager"),
    "desugar": lambda f: desugar.compile(f, backend="eager"),
    "backend": lambda f: torch.compile(f, backend="desugar", options={"backend": "eager"}),
}
# A function of a value and a plain tensor, and the size of the latter.
CALLS = {
    "product": (lambda x, w: x * w, (4,)),
    "two uses": (lambda x, w: (x * w) + w, (4,)),
    "two operands": (lambda x, w: torch.addcmul(x, w, w), (3, 4)),
    "linear": (lambda x, w: F.linear(x, w), (5, 4)),
    "matmul": (lambda x, w: x @ w, (4, 2)),
    "layer_norm": (lambda x, w: F.layer_norm(x, (4,), w), (4,)),
    "cat": (lambda x, w: torch.cat([x, w]), (2, 4)),
    "where": (lambda x, w: torch.where(w > 0, w, x), (3, 4)),
    "computed": (lambda x, w: x * w.sin(), (3, 4)),
    "a view": (lambda x, w: x * w[1], (2, 4)),
    "empty": (lambda x, w: x[:0] * w, (4,)),
}


def loss(x):
    return 2 * x.east.sum() + x.north.square().sum()


def leaves(size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(s, generator=generator, dtype=dtype) for s in ((3, 4), (3, 4), size)]
    return [t.requires_grad_() for t in made]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", CALLS)
def test_the_gradient_is_the_sum_over_inner_tensors(name, door):
    call, size = CALLS[name]
    fn = DOORS[door](call)
    for _ in range(2):  # also of a program that has run before
        east, north, w = leaves(size)
        loss(fn(Wind(east, north), w)).backward()
        plain = leaves(size)
        (2 * call(plain[0], plain[2]).sum() + call(plain[1], plain[2]).square().sum()).backward()
        assert type(w.grad) is Tensor
        torch.testing.assert_close([t.grad for t in (east, north, w)], [t.grad for t in plain])


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "make", [lambda w: w, lambda w: w * 3, lambda w: w.flatten()], ids=["leaf", "computed", "view"]
)
def test_a_plain_gradient_of_the_same_operand_counts_once(make, door):
    """As that of weight decay by a loss."""

    def f(east, north, w):
        used = make(w)
        return loss(Wind(east, north) * used) + used.square().sum() + used.exp().sum() + (used * w).sum()

    def plain(east, north, w):
        used = make(w)
        return (
            2 * (east * used).sum()
            + (north * used).square().sum()
            + used.square().sum()
            + used.exp().sum()
            + (used * w).sum()
        )

    found, expected = leaves((4,)), leaves((4,))
    DOORS[door](f)(*found).backward()
    plain(*expected).backward()
    torch.testing.assert_close([t.grad for t in found], [t.grad for t in expected])


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("cls", [Wind, Measured])
def test_an_operand_that_was_computed_from_inner_tensors(cls, door):
    def normed(east, north):
        x = cls(east * 1.0, north * 1.0)
        norm = x.norm() if cls is Measured else (x.east.square() + x.north.square()).sum().sqrt()
        return (x / norm).east

    found, plain = leaves((1,))[:2], leaves((1,))[:2]
    DOORS[door](normed)(*found).square().sum().backward()
    (plain[0] / torch.hypot(*plain).norm()).square().sum().backward()
    torch.testing.assert_close([t.grad for t in found], [t.grad for t in plain])


def test_an_optimizer_steps_the_weights_that_a_value_went_through():
    layer = nn.Linear(4, 2, dtype=torch.float64)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    east, north, _ = leaves((1,), torch.float64)
    before = loss(layer(Wind(east, north)))
    before.backward()
    assert all(type(p.grad) is Tensor for p in layer.parameters())
    optimizer.step()
    assert loss(layer(Wind(east, north))) < before


def test_a_second_derivative():
    east, north, w = leaves((4,), torch.float64)

    def of(w):
        return loss(Wind(east, north).sin() * w.sin())

    (first,) = torch.autograd.grad(of(w), w, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), w)
    x = 2 * east.sin().sum(0) * -w.sin() + north.sin().square().sum(0) * 2 * (2 * w).cos()
    torch.testing.assert_close(second, x.detach())


def test_one_hook_for_many_calls():
    east, north, w = leaves((4,))
    for _ in range(5):
        Wind(east, north) * w
    assert len(w._backward_hooks) == 1
    with torch.no_grad():
        Wind(east, north) * w.detach().requires_grad_()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
@pytest.mark.parametrize("make", [lambda w: w, nn.Parameter])
def test_a_copy_of_an_operand_has_a_hook_of_its_own(make, copied):
    east, north, w = leaves((4,))
    w = make(w.detach().requires_grad_())
    loss(Wind(east, north) * w).backward()
    w.grad, expected = None, w.grad
    other = copied(w)
    loss(Wind(east, north) * other).backward()
    torch.testing.assert_close(other.grad, expected)
