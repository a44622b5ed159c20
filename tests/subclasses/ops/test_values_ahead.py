"""Inner tensors read in a compiled function beside a use of the whole value outside: two kinds of cotangents meet."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import desugar
from subclasses import DispatchError, Outer, TensorSubclass, inner


class LowRank(TensorSubclass, fallback="materialize"):
    left: Tensor = inner(differentiable=True)
    right: Tensor = inner(differentiable=True)

    @staticmethod
    def outer(left, right):
        return Outer((left.shape[0], right.shape[1]), dtype=left.dtype)

    def materialize(self):
        return self.left @ self.right


class Trained(LowRank, trainable=True):
    """The same, whose inner tensors an optimizer updates."""


def parts(scale=1.0):
    left, right = torch.arange(1.0, 3.0).view(2, 1) * scale, torch.arange(1.0, 4.0).view(1, 3)
    return left.requires_grad_(), right.requires_grad_()


def read(x, *others):
    found = (x.unwrap("left") ** 2).sum()
    for y in others:
        found = found * (y.unwrap("left") if isinstance(y, LowRank) else y).sum()
    return found


def made(call):
    leaves = parts()
    x = LowRank(*leaves)
    (call(x) * 2 + (x**2).sum() * 3).backward()
    return [t.grad for t in leaves]


def used_first(call):
    leaves = parts()
    x = LowRank(*leaves)
    ((x**2).sum() * 3 + call(x) * 2).backward()
    return [t.grad for t in leaves]


def leaf(call):
    x = LowRank(*(t.detach() for t in parts())).requires_grad_()
    (call(x) * 2 + (x**2).sum() * 3).backward()
    return [x.grad.left, x.grad.right]


def parameter(call):
    x = nn.Parameter(Trained(*(t.detach() for t in parts())))
    (call(x) * 2 + (x**2).sum() * 3).backward()
    return [x.grad.left, x.grad.right]


def beside_a_plain_one(call):
    leaves, p = parts(), torch.rand(5, 3, requires_grad=True)
    x = LowRank(*leaves)
    (call(x, p * 2) * 2 + (x**2).sum() * 3).backward()
    return [t.grad for t in (*leaves, p)]


def twice(call):
    leaves = parts()
    x = LowRank(*leaves)
    loss = call(x) * 2 + (x**2).sum() * 3
    loss.backward(retain_graph=True)
    loss.backward()
    return [t.grad for t in leaves]


def of_two(call):
    leaves, more = parts(), parts(2.0)
    x, y = LowRank(*leaves), LowRank(*more)
    (call(x, y) + (x**2).sum() + (y**3).sum()).backward()
    return [t.grad for t in (*leaves, *more)]


def beside_a_plain_one_of_its_size(call):
    leaves, p = parts(), torch.ones(2, 3, requires_grad=True)
    x = LowRank(*leaves)
    (call(x, p * 2) * 2 + (x**2).sum() * 3).backward()
    return [t.grad for t in (*leaves, p)]


DOORS = {
    "aot_eager": lambda fn: torch.compile(fn, backend="aot_eager"),
    "desugar": lambda fn: desugar.compile(fn, backend="eager"),
}


@pytest.mark.sweep(10)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("use", [made, used_first, leaf, parameter, beside_a_plain_one, twice])
def test_both_add_up(use, door):
    torch.manual_seed(0)
    expected = use(read)
    torch.manual_seed(0)
    torch.testing.assert_close(use(DOORS[door](read)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("use", [of_two, beside_a_plain_one_of_its_size])
def test_where_it_is_not_known_to_which_value_a_sum_leads(use):
    """The engine tells the node that ran, and not which of its results is added."""
    torch.testing.assert_close(use(DOORS["desugar"](read)), use(read))
    with pytest.raises(DispatchError, match=r"compile it with desugar\.compile"):
        use(DOORS["aot_eager"](read))
