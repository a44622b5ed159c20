"""Optimizers do not ask the rules of a class for arithmetic, in eager mode and in compiled steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import subclasses
from subclasses import DispatchError, inner
from tests.doors import DOORS
from tests.subclasses.dispatch.training import check_trained
from tests.subclasses.subjects import LowRank, declare

BALL = {"radius": inner(), "center": inner()}


def of_balls(func, x, y):
    """Radii add up, whatever is done with the centers."""
    (r, c), (s, d) = ((t.radius, t.center) if isinstance(t, Ball) else (0, t) for t in (x, y))
    radius = r * abs(d) + s * abs(c) if func is torch.mul else r + s
    center = func(c, d)
    return Ball(radius.expand_as(center), center)


def never(func, x, *args, **kwargs):
    """A rule for functions, above autograd."""
    raise AssertionError(f"an optimizer asked for {func}")


FUNCTIONS = [torch.add, torch.sub, torch.mul, torch.div, torch.sqrt]
Ball = declare(keywords={"fallback": "map"}, rules={subclasses.arithmetic: of_balls}, **BALL)
Above = declare(keywords={"fallback": "map"}, rules=dict.fromkeys(FUNCTIONS, never), **BALL)
# A class that cannot be mapped.
Product = declare(
    keywords={"fallback": "materialize", "trainable": True},
    materialize=lambda self: self.radius * self.center,
    **BALL,
)


def loss(radius, center):
    return (radius.square() + (radius * center).square()).sum()


def check(cls, optimizer, door="eager", **how):
    p = nn.Parameter(cls(torch.randn(3, 2), torch.randn(3, 2)))
    check_trained(p, lambda p: loss(*p.unwrap()), loss, optimizer, door=door, **how)


foreach = pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "foreach"])


@foreach
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adadelta", "RAdam"])
@pytest.mark.parametrize("cls", [Ball, Above])
def test_a_step_is_that_of_each_inner_tensor(cls, optimizer, foreach):
    check(cls, optimizer, foreach=foreach)


@pytest.mark.sweep(18)
@foreach
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("cls", [Ball, Product])
@pytest.mark.parametrize("door", ["stock", "desugar"])
def test_a_compiled_step_is_the_same(cls, optimizer, foreach, door):
    check(cls, optimizer, door, clip=False, foreach=foreach)


def test_values_keep_their_rules():
    x = Ball(torch.ones(2), torch.ones(2))
    p = nn.Parameter(x.clone())
    assert (p - x).detach().radius.tolist() == [2, 2] and x.sub_(x).radius.tolist() == [2, 2]
    with torch.no_grad():
        assert (p - p).radius.tolist() == [2, 2] and p.sub_(p).radius.tolist() == [0, 0]


WRITES = {
    "mul_.Tensor": lambda p: p.mul_(0.5),
    "_foreach_mul_.Scalar": lambda p: torch._foreach_mul_([p], 0.5),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("door", ["stock", "desugar"])
@pytest.mark.parametrize(
    ("op", "make"),
    [
        ("mul_.Tensor", lambda: Ball(*torch.ones(2, 2))),
        ("mul_.Tensor", lambda: Product(*torch.ones(2, 2))),
        ("mul_.Tensor", lambda: LowRank(*torch.ones(2, 2, 2))),
        ("_foreach_mul_.Scalar", lambda: LowRank(*torch.ones(2, 2, 2))),
    ],
)
def test_a_graph_does_not_write_to_a_parameter(op, make, door):
    """Without fullgraph the graph ends there, as the error advises, and the inner tensors are written to."""
    p, step = nn.Parameter(make()), torch.no_grad()(WRITES[op])
    words = (
        rf"aten.{op} writes to a Parameter of an? \w+ in a compiled function, .*; compile without fullgraph=True, "
        "or keep the optimizer's step out"
    )
    with pytest.raises(Exception, match=words):  # by way of Dynamo's own
        DOORS[door](step, fullgraph=True)(p)
    assert torch.stack(p.detach().unwrap()).unique().tolist() == [1]
    torch.compiler.reset()
    DOORS[door](step)(p)
    assert torch.stack(p.detach().unwrap()).unique().tolist() == [0.5]


@pytest.mark.parametrize("cls", [Ball, Product])
def test_a_gradient_of_the_users_own(cls):
    p = nn.Parameter(cls(torch.ones(2), torch.ones(2)))
    p.grad = torch.ones(2)
    words = r"A step of an optimizer takes Parameters, .* what torch.zeros_like gives for a Parameter"
    with pytest.raises(DispatchError, match=words):
        torch.optim.SGD([p]).step()
    p.grad = torch.zeros_like(p).add_(1)
    torch.optim.SGD([p], lr=0.5).step()
    assert torch.stack(p.detach().unwrap()).unique().tolist() == [0.5]
