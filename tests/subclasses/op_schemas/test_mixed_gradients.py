"""Inner tensors read in a compiled function beside a use of the whole value outside: two kinds of gradients meet."""

from functools import partial

import pytest
import torch
from torch import nn

from subclasses import Outer, inner
from tests.doors import COMPILED, DOORS
from tests.subclasses.autograd.judge import agree, numbers
from tests.subclasses.subjects import declare

LowRank = declare(
    keywords={"fallback": "materialize"},
    left=inner(differentiable=True),
    right=inner(differentiable=True),
    outer=staticmethod(lambda left, right: Outer((left.shape[0], right.shape[1]), dtype=left.dtype)),
    materialize=lambda self: self.left @ self.right,
)
Trained = declare(LowRank, keywords={"trainable": True})  # an optimizer updates its inner tensors


def read(x, *others):
    found = (x.unwrap("left") ** 2).sum()
    for y in others:
        found = found * (y.unwrap("left") if isinstance(y, LowRank) else y).sum()
    return found


def made(call, left, right, *others):
    x = LowRank(left, right)
    return call(x, *(t * 2 for t in others)) * 2 + (x**2).sum() * 3


def used_first(call, left, right):
    x = LowRank(left, right)
    return (x**2).sum() * 3 + call(x) * 2


def of_two(call, left, right, *more):
    x, y = LowRank(left, right), LowRank(*more)
    return call(x, y) + (x**2).sum() + (y**3).sum()


SIZES = [(2, 1), (1, 3)]
# A use of a part and of the whole, and the sizes of the leaves.
USES = {
    "made": (made, SIZES),
    "used first": (used_first, SIZES),
    "beside a plain one": (made, [*SIZES, (5, 3)]),
    "of two": (of_two, SIZES * 2),
    "beside a plain one of its size": (made, [*SIZES, (2, 3)]),
}


@pytest.mark.sweep(5)
@pytest.mark.parametrize("door", COMPILED)
@pytest.mark.parametrize("name", USES)
def test_both_add_up(name, door):
    use, sizes = USES[name]
    agree(partial(use, COMPILED[door](read)), partial(use, read), numbers(*sizes))


MAKERS = {
    "leaf": lambda *parts: Trained(*parts).requires_grad_(),
    "parameter": lambda *parts: nn.Parameter(Trained(*parts)),
    "made": lambda *parts: LowRank(*(t.requires_grad_() for t in parts)),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", MAKERS)
def test_both_add_up_in_a_backward_that_runs_twice(kind):
    found = []
    for call in (read, DOORS["desugar"](read)):
        parts = numbers(*SIZES)
        x = MAKERS[kind](*parts)
        loss = call(x) * 2 + (x**2).sum() * 3
        for _ in range(2):
            loss.backward(retain_graph=True)
        found.append(list(x.grad.unwrap()) if x.is_leaf else [t.grad for t in parts])
    torch.testing.assert_close(*found)
