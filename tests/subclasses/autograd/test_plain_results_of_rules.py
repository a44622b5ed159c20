"""Plain tensors that rules for ops make of values which represent no plain tensors: their derivative is the rule's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import subclasses
from subclasses import TensorSubclass, inner
from tests.subclasses.subjects import MODES

aten = torch.ops.aten


class Weighted(TensorSubclass, fallback="map"):
    value: Tensor = inner()
    weight: Tensor = inner()


class Refusing(TensorSubclass):
    value: Tensor = inner()
    weight: Tensor = inner()


class Converting(TensorSubclass):
    value: Tensor = inner()
    weight: Tensor = inner()

    def wrap_cotangent(self, cotangent):
        return Converting(cotangent, torch.zeros_like(self.weight))


for cls in (Weighted, Refusing, Converting):

    @cls.implements(subclasses.reductions)
    def _(func, x, dim, keepdim, **kwargs):
        if func is not torch.mean:
            return NotImplemented
        return (x.value * x.weight).sum(dim, keepdim=keepdim) / x.weight.sum(dim, keepdim=keepdim)

    @cls.implements(aten.mm.default)
    def _(func, x, y):
        return func(x.value * x.weight, y)

    @cls.implements(aten.frexp.Tensor)
    def _(func, x):
        return x.value * x.weight, x.weight.to(torch.int32)

    @cls.implements(aten.relu.default)
    def _(func, x):
        return (x.value * x.weight).detach()

    @cls.implements(aten.mul.Tensor)
    def _(func, x, y):
        return type(x)(x.value * y, x.weight)


def weighted_mean(x, w, dim=None):
    return (x * w).sum(dim) / w.sum(dim) if dim is not None else (x * w).sum() / w.sum()


# What is done with a value and a plain tensor, and with the inner tensors and that.
CASES = {
    "mean": (lambda x, y: x.mean(), lambda v, w, y: weighted_mean(v, w)),
    "mean over a dim": (lambda x, y: x.mean(1).exp(), lambda v, w, y: weighted_mean(v, w, 1).exp()),
    "after another rule": (lambda x, y: (x * 3).mean(0), lambda v, w, y: weighted_mean(v * 3, w, 0)),
    "a matrix product": (lambda x, y: x.mm(y), lambda v, w, y: (v * w) @ y),
    "one of two results": (lambda x, y: torch.frexp(x).mantissa, lambda v, w, y: v * w),
    "twice": (
        lambda x, y: x.mm(y).sum() * x.mean(),
        lambda v, w, y: ((v * w) @ y).sum() * weighted_mean(v, w),
    ),
    "written to afterwards": (lambda x, y: x.mm(y).mul_(2).add_(1), lambda v, w, y: (v * w) @ y * 2 + 1),
}


@pytest.mark.sweep(20)
@pytest.mark.parametrize("door", MODES)
@pytest.mark.parametrize("cls", [Weighted, Refusing, Converting])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_what_the_rule_computes(case, cls, door):
    function, plain = CASES[case]
    torch.manual_seed(0)
    leaves = [torch.rand(3, 4, requires_grad=True), torch.rand(3, 4, requires_grad=True)]
    y = torch.rand(4, 2, requires_grad=True)
    compiled = MODES[door](lambda v, w, y: function(cls(v, w), y))
    for _ in range(2):
        got, expected = compiled(*leaves, y), plain(*leaves, y)
        torch.testing.assert_close(got, expected)
        gradients = [
            torch.autograd.grad(t.square().sum(), [*leaves, y], allow_unused=True) for t in (got, expected)
        ]
        torch.testing.assert_close(*gradients)


def test_they_are_differentiated_again():
    leaves = [torch.rand(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradgradcheck(lambda v, w: Refusing(v, w).mean(1), leaves)


def test_a_module_trains():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.value, self.weight = (nn.Parameter(torch.rand(3, 4)) for _ in range(2))

        def forward(self, x):
            return Refusing(self.value, self.weight).mm(x)

    torch.manual_seed(0)
    layer, x = Layer(), torch.rand(4, 2)
    F.mse_loss(layer(x), torch.zeros(3, 2)).backward()
    value, weight = (p.detach().clone().requires_grad_() for p in (layer.value, layer.weight))
    F.mse_loss((value * weight) @ x, torch.zeros(3, 2)).backward()
    torch.testing.assert_close((layer.value.grad, layer.weight.grad), (value.grad, weight.grad))


def test_hooks_and_a_second_backward():
    value, met = torch.rand(3, requires_grad=True), []
    out = Weighted(value, torch.ones(3)).mean()
    out.register_hook(lambda g: met.append(g.item()))
    out.backward(retain_graph=True)
    out.backward()
    assert met == [1, 1] and value.grad is not None
    torch.testing.assert_close(value.grad, torch.full((3,), 2 / 3))
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


def test_a_rule_without_a_derivative_gives_a_result_without_one():
    out = torch.relu(Weighted(torch.rand(3, requires_grad=True), torch.ones(3)))
    assert not out.requires_grad


def test_an_operand_that_was_written_to_is_noticed():
    x = Weighted(torch.rand(3), torch.ones(3)).requires_grad_() * 1
    out = x.mean()
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified inplace"):
        out.backward()


def test_a_tensor_that_a_rule_hands_on_keeps_no_trace_of_it():
    class Handing(TensorSubclass):
        value: Tensor = inner()

        def wrap_cotangent(self, cotangent):
            return Handing(cotangent)

    Handing.implements(aten.cos.default)(lambda func, x: x.value)
    value = torch.rand(3, requires_grad=True)
    x = Handing(value)
    x.cos().sum().backward()
    assert x.value.__dict__ == {} and value.grad is not None and value.grad.tolist() == [1, 1, 1]


class Quotient(TensorSubclass):
    """Its rules for views return plain tensors."""

    above: Tensor = inner()
    below: Tensor = inner()


@Quotient.implements(
    aten.select.int,
    aten.slice.Tensor,
    aten.view.default,
    aten.t.default,
    aten.transpose.int,
    aten.unbind.int,
    aten.split.Tensor,
    aten.expand.default,
)
def _(func, x, *args, **kwargs):
    return func(x.above / x.below, *args, **kwargs)


VIEWS = {
    "select": lambda x: x[0] * x[1].sin(),
    "view": lambda x: x.view(-1).cos(),
    "t": lambda x: x.t().exp(),
    "mT": lambda x: x.mT.sin(),
    "unbind": lambda x: x.unbind(0)[1].sin(),
    "all rows": lambda x: sum(row.sin() for row in x),
    "split": lambda x: torch.split(x, 1)[1].sin(),
    "a view of a view": lambda x: x[0][1:].sin(),
    "product": lambda x: torch.ones(2, 2) @ x[:, :2].sin(),
    "expand": lambda x: x.expand(4, 2, 3).sin(),
}


@pytest.mark.sweep(20)
@pytest.mark.parametrize("door", MODES)
@pytest.mark.parametrize("view", VIEWS)
def test_plain_views_have_the_derivative_of_the_rule(view, door):
    function = VIEWS[view]
    leaves = [
        torch.arange(6.0).reshape(2, 3).add(1).requires_grad_(),
        torch.full((2, 3), 2.0, requires_grad=True),
    ]
    compiled = MODES[door](lambda a, b: function(Quotient(a, b)))
    found, expected = compiled(*leaves), function(leaves[0] / leaves[1])
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(t.sum(), leaves, create_graph=door != "stock") for t in (found, expected)]
    torch.testing.assert_close(*grads)
    if door != "stock":
        second = [torch.autograd.grad(sum((g * g).sum() for g in gs), leaves) for gs in grads]
        torch.testing.assert_close(*second)


def test_a_write_to_a_plain_view_is_refused():
    class Held(TensorSubclass):
        held: Tensor = inner()

    @Held.implements(aten.select.int)
    def _(func, x, *args):
        return func(x.held, *args)

    leaf = torch.ones(2, 3, requires_grad=True)
    x = Held(leaf * 3.0)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        x[0].mul_(2.0)
    with torch.no_grad():
        x[0].mul_(2.0)
    assert x.held[0, 0] == 6.0
