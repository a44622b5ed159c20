"""A Parameter that a function materialized: its backward needs the inner tensors of the forward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import desugar
from subclasses import DispatchError
from tests.subclasses.subjects import LowRank

X = torch.ones(1, 2)


def make():
    return nn.Parameter(LowRank(torch.ones(2, 1), torch.ones(1, 2)))


def assign(w):
    w.left = w.left * 2


CHANGES = {
    "a step": lambda w: torch.optim.SGD([w], lr=0.1).step(),
    "in place": lambda w: w.mul_(2),
    "an inner tensor": lambda w: w.right.mul_(2),
    "an assignment": assign,
    "data": lambda w: setattr(w, "data", LowRank(w.left * 2, w.right.clone())),
}
CALLS = {
    "a method": lambda w: w.square(),
    "a function": lambda w: F.linear(X, w),
    "a list": lambda w: torch.cat([w, torch.zeros(1, 2)]),
    "a keyword": lambda w: F.linear(X, weight=w),
    "several results": lambda w: torch.stack(w.square().unbind()),
    "an operand": lambda w: X + w,
    "autocast": lambda w: torch.autocast("cpu", torch.bfloat16)(F.linear)(X, w).float(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("call", CALLS)
def test_a_change_between_forward_and_backward_is_refused(call, change):
    w = make()
    first, second = CALLS[call](w).sum(), CALLS[call](w).sum()
    first.backward()
    with torch.no_grad():
        CHANGES[change](w)
    with pytest.raises(
        DispatchError, match=r"materialize\(\) with the inner tensors of the forward, and one of them"
    ):
        second.backward()


@pytest.mark.parametrize("call", CALLS)
def test_several_steps_and_backwards_without_a_change_are_those_of_the_inner_tensors(call):
    w, inners = make(), [torch.ones(2, 1).requires_grad_(), torch.ones(1, 2).requires_grad_()]
    for _ in range(3):
        for value in (w, LowRank(*inners)):
            loss = CALLS[call](value).square().sum() + CALLS[call](value).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        torch.testing.assert_close([w.grad.left, w.grad.right], [t.grad for t in inners])
        torch.optim.SGD([w], lr=0.01).step()
        torch.optim.SGD(inners, lr=0.01).step()
        w.grad = inners[0].grad = inners[1].grad = None


def test_what_needs_no_gradient_of_the_parameter_is_no_business_of_its_own():
    frozen, x = nn.Parameter(LowRank(torch.ones(2, 1), torch.ones(1, 2)), requires_grad=False), X.clone()
    out = F.linear(x.requires_grad_(), frozen)
    frozen.right.mul_(3)
    out.sum().backward()
    assert x.grad.tolist() == [[2, 2]]
    w = make()
    with torch.no_grad():
        w.left.mul_(2)
        assert F.linear(X, w).tolist() == [[4, 4]]
    evaluated = F.linear(X, w)
    with torch.no_grad():
        w.left.mul_(2)
    del evaluated  # whose backward is never asked for
    F.linear(X, w).sum().backward()
    assert w.grad.right.tolist() == [[8, 8]]


def test_a_checkpointed_forward_is_checked_against_the_one_that_runs_again():
    w, x = make(), X.clone().requires_grad_()
    out = torch.utils.checkpoint.checkpoint(lambda x: F.linear(x, w).square(), x, use_reentrant=False)
    out.sum().backward()
    assert w.grad.left.tolist() == [[8], [8]]


@pytest.mark.parametrize(
    "door",
    [
        lambda fn: torch.compile(fn, backend="desugar", options={"backend": "eager"}),
        lambda fn: desugar.compile(fn, backend="eager"),
    ],
)
def test_compiled_functions_refuse_it_by_what_they_saved(door):
    w = make()
    compiled = door(lambda w: F.linear(X, w).square().sum())
    first, second = compiled(w), compiled(w)
    first.backward()
    torch.optim.SGD([w], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()
