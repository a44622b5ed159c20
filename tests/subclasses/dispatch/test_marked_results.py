"""What an author's rule computes from a cotangent is a cotangent: sums of gradients add inner tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import desugar
from subclasses import TensorSubclass, inner

aten = torch.ops.aten

DOORS = {
    "eager": lambda fn: fn,
    "stock": lambda fn: torch.compile(fn, backend="aot_eager", fullgraph=True),
    "desugar.compile": lambda fn: desugar.compile(fn, backend="eager", fullgraph=True, strict=True),
}


class Log(TensorSubclass, fallback="materialize"):
    """Stands for the exponential of what it holds, so adding two values is not adding what they hold."""

    logs: Tensor = inner(differentiable=True)

    def materialize(self):
        return self.logs.exp()


@Log.implements(aten.select.int, aten.select_backward.default, aten.slice.Tensor, aten.t.default)
def move(func, x, *args):
    return Log(func(x.logs, *args))


@Log.implements(aten.cat.default)
def join(func, tensors, dim=0):
    return Log(func([x.logs for x in tensors], dim))


class Bare(TensorSubclass):
    """No fallback, and no rule for what autograd itself calls."""

    values: Tensor = inner(differentiable=True)


@pytest.mark.parametrize("door", DOORS)
def test_a_view_and_the_whole(door):
    def fn(held):
        x = Log(held)
        return (x[0].logs * 2).sum() + x.logs.sum() + x.t()[1].unwrap("logs").sum()

    held = torch.ones(2, 3, requires_grad=True)
    DOORS[door](fn)(held).backward()
    assert held.grad.tolist() == [[3, 4, 3], [1, 2, 1]]


def test_a_list_of_operands():
    held = torch.ones(2, requires_grad=True)
    x = Log(held)
    (torch.cat([x, x]).logs.sum() + x.logs.sum()).backward()
    assert held.grad.tolist() == [3, 3]


def test_a_rule_that_returns_an_operand_leaves_it_as_it_is():
    kept = Log(torch.ones(2))
    Keeps = type("Keeps", (Log,), {})
    Keeps.implements(aten.sin.default)(lambda func, x: kept)
    Keeps.implements(aten.atan2.default)(lambda func, x, y: y)
    x = Keeps(torch.ones(2)).requires_grad_()
    x.logs.sum().backward()
    value = Keeps(torch.zeros(2))
    assert x.grad._layout.cotangent
    assert torch.atan2(x.grad, value) is value and not value._layout.cotangent


@pytest.mark.parametrize("reduce", [torch.sum, torch.mean])
def test_the_gradient_of_a_leaf_without_a_rule_for_what_autograd_calls(reduce):
    x = Bare(torch.ones(2, 3)).requires_grad_()
    reduce(x.values).backward()
    reduce(x.values).backward()
    expected = torch.full((2, 3), 2.0 if reduce is torch.sum else 2 / 6)
    torch.testing.assert_close(x.grad.values, expected)
    assert x.grad.values.is_contiguous()


def test_a_cotangent_is_divided_by_a_number():
    x = Log(torch.ones(2)).requires_grad_()
    x.logs.sum().backward()
    torch.testing.assert_close(aten.div.Scalar(x.grad, 4).logs, torch.full((2,), 0.25))


@pytest.mark.parametrize("add", [torch.add, Tensor.add, Tensor.__add__, lambda x, y: x + y])
def test_a_rule_for_several_functions_is_called_with_the_one_that_it_names(add):
    Named = type("Named", (Bare,), {})
    Named.implements(torch.add, torch.sub)(
        lambda func, x, y: Named(func(x.values, y.values) if func is torch.add else x.values * 0)
    )
    assert add(Named(torch.ones(1)), Named(torch.ones(1))).values.item() == 2
