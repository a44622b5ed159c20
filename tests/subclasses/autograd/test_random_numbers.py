"""Ops and rules that draw random numbers: the backward uses the numbers that the forward drew."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses import inner
from tests.doors import DOORS
from tests.subclasses.subjects import declare

aten = torch.ops.aten


def dropped(func, x, p, train):
    out, mask = func(x.a, p, train)
    return Ruled(out), mask


# Has a rule, so that its ops are derived by running them again.
Mapped = declare(
    keywords={"fallback": "map"},
    rules={
        aten.mul.Tensor: lambda func, x, y: Mapped(
            func(*(t.a if isinstance(t, Mapped) else t for t in (x, y)))
        )
    },
    a=inner(differentiable=True),
)
# Has a rule for an op that draws random numbers.
Ruled = declare(
    keywords={"fallback": "materialize", "kind": "structure"},
    rules={aten.native_dropout.default: dropped},
    a=inner(differentiable=True),
    materialize=lambda self: self.a * 1,
)
# Has a rule that draws random numbers for an op that does not.
Rounded = declare(
    rules={aten.mul.Tensor: lambda func, x, y: Rounded(func(x.a, y) * (torch.rand_like(x.a) < 0.5))},
    a=inner(differentiable=True),
)

DRAWS = {
    "native_dropout, mapped": lambda a: torch.native_dropout(Mapped(a), 0.5, True)[0].a,
    "native_dropout, ruled": lambda a: torch.native_dropout(Ruled(a), 0.5, True)[0].a,
    "dropout": lambda a: F.dropout(Mapped(a), 0.5).a,
    "a rule that draws": lambda a: (Rounded(a) * 3.0).a,
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", DRAWS)
def test_a_forward_and_its_backward_have_one_mask(name, door):
    a = torch.ones(64, requires_grad=True)
    y = DOORS[door](DRAWS[name])(a)
    y.sum().backward()
    assert torch.equal(a.grad, y.detach()) and 0 < int((y == 0).sum()) < 64


def test_a_sample_with_a_derivative():
    found = {}
    for make in (lambda a: a, lambda a: Mapped(a)):
        torch.manual_seed(0)
        a = torch.full((4,), 2.0, requires_grad=True)
        y = torch._standard_gamma(make(a))
        (y.a if isinstance(y, Mapped) else y).sum().backward()
        found[type(y)] = a.grad
    assert torch.equal(found[Tensor], found[Mapped])


def test_second_derivatives_are_of_the_same_numbers():
    a = torch.full((64,), 3.0, requires_grad=True)
    y = DRAWS["native_dropout, mapped"](a)
    (first,) = torch.autograd.grad((y**2).sum(), a, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), a)
    kept = (y.detach() != 0) * 2.0
    assert torch.equal(first.detach(), 2 * y.detach() * kept) and torch.equal(second, 2 * kept**2)


def test_without_a_derivative():
    a = torch.ones(8, requires_grad=True)
    assert not torch.rand_like(Mapped(a)).requires_grad
    drawn = torch.bernoulli(Mapped(a * 0.5))
    (grad,) = torch.autograd.grad(drawn.a.sum(), a)
    assert torch.equal(grad, torch.zeros(8))


def test_a_rule_runs_once():
    calls = []
    Counted = declare(
        rules={aten.mul.Tensor: lambda func, x, y: (calls.append(func), Counted(func(x.a, y)))[1]},
        a=inner(differentiable=True),
    )
    a = torch.ones(8, requires_grad=True)
    (Counted(a) * 3.0).a.square().sum().backward()
    assert torch.equal(a.grad, torch.full((8,), 18.0)) and len(calls) == 1
