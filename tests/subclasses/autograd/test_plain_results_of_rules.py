"""Plain tensors that rules for ops make of values which represent no plain tensors: their derivative is the rule's."""

from __future__ import annotations

import pytest
import torch

import subclasses
from subclasses import inner
from tests.doors import DOORS
from tests.subclasses.autograd.judge import agree, numbers
from tests.subclasses.subjects import declare

aten = torch.ops.aten


def rule_for_means(func, x, dim, keepdim, **kwargs):
    if func is not torch.mean:
        return NotImplemented
    return (x.value * x.weight).sum(dim, keepdim=keepdim) / x.weight.sum(dim, keepdim=keepdim)


WEIGHTED = {
    "value": inner(),
    "weight": inner(),
    "rules": {
        subclasses.reductions: rule_for_means,
        aten.mm.default: lambda func, x, y: func(x.value * x.weight, y),
        aten.frexp.Tensor: lambda func, x: (x.value * x.weight, x.weight.to(torch.int32)),
        aten.relu.default: lambda func, x: (x.value * x.weight).detach(),
        aten.mul.Tensor: lambda func, x, y: type(x)(x.value * y, x.weight),
    },
}
Weighted = declare(keywords={"fallback": "map"}, **WEIGHTED)
Refusing = declare(**WEIGHTED)
Converting = declare(
    wrap_cotangent=lambda self, cotangent: Converting(cotangent, torch.zeros_like(self.weight)), **WEIGHTED
)


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
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("cls", [Weighted, Refusing, Converting])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_what_the_rule_computes(case, cls, door):
    function, plain = CASES[case]
    agree(
        lambda v, w, y: function(cls(v, w), y), plain, numbers((3, 4), (3, 4), (4, 2)), door=door, zeros=False
    )


def test_they_are_differentiated_again():
    agree(lambda v, w: Refusing(v, w).mean(1), lambda v, w: weighted_mean(v, w, 1), numbers((3, 4), (3, 4)),
          twice=True)  # fmt: skip


def test_hooks_and_a_second_backward():
    value, met = torch.rand(3, requires_grad=True), []
    out = Weighted(value, torch.ones(3)).mean()
    out.register_hook(lambda g: met.append(g.item()))
    out.backward(retain_graph=True)
    out.backward()
    torch.testing.assert_close((met, value.grad), ([1.0, 1.0], torch.full((3,), 2 / 3)))
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
    Handing = declare(
        wrap_cotangent=lambda self, cotangent: Handing(cotangent),
        rules={aten.cos.default: lambda func, x: x.held},
    )
    held = torch.rand(3, requires_grad=True)
    x = Handing(held)
    x.cos().sum().backward()
    assert x.held.__dict__ == {} and held.grad.tolist() == [1, 1, 1]


# Its rules for views return plain tensors.
Quotient = declare(above=inner(), below=inner())
Quotient.implements(
    aten.select.int,
    aten.slice.Tensor,
    aten.view.default,
    aten.t.default,
    aten.transpose.int,
    aten.unbind.int,
    aten.split.Tensor,
    aten.expand.default,
)(lambda func, x, *args, **kwargs: func(x.above / x.below, *args, **kwargs))

VIEWS = {
    "select": lambda x: x[0] * x[1].sin(),
    "view": lambda x: x.view(-1).cos(),
    "t": lambda x: x.t().exp(),
    "mT": lambda x: x.mT.sin(),
    "unbind": lambda x: x.unbind(0)[1].sin(),
    "all rows": lambda x: sum(row.sin() for row in x),
    "split": lambda x: torch.split(x, 1)[1].sin(),
    "a view of a view": lambda x: x[0][1:].sin(),
    "product": lambda x: torch.ones(2, 2, dtype=torch.float64) @ x[:, :2].sin(),
    "expand": lambda x: x.expand(4, 2, 3).sin(),
}


@pytest.mark.sweep(20)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("view", VIEWS)
def test_plain_views_have_the_derivative_of_the_rule(view, door):
    function = VIEWS[view]
    agree(
        lambda a, b: function(Quotient(a, b)),
        lambda a, b: function(a / b),
        numbers((2, 3), (2, 3)),
        door=door,
        twice=door != "stock",
    )


def test_a_write_to_a_plain_view_is_refused():
    Held = declare(rules={aten.select.int: lambda func, x, *args: func(x.held, *args)})
    x = Held(torch.ones(2, 3, requires_grad=True) * 3.0)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        x[0].mul_(2.0)
    with torch.no_grad():
        x[0].mul_(2.0)
    assert x.held[0, 0] == 6.0
