"""Rules whose parameters have other names than those of PyTorch's functions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import desugar
from subclasses import SpecError, TensorSubclass, inner
from subclasses.rules.keyword_names import taken_by, with_keyword_names

DOORS = {
    "eager": lambda fn: fn,
    "stock": lambda fn: torch.compile(fn, backend="eager", fullgraph=True),
    "desugar": lambda fn: desugar.compile(fn, backend="eager", fullgraph=True),
}


class Held(TensorSubclass):
    """Rules that return plain tensors."""

    held: Tensor = inner()


@Held.implements(F.linear)
def _(func, x, w, b=None):
    return func(x, w.unwrap("held"), b)


@Held.implements(torch.sum)
def _(func, value, axes=None, keep=False):
    return func(value.unwrap("held"), dim=axes, keepdim=keep)


@Held.implements(torch.argmax)
def _(func, value, axis=None, keep=False):
    return func(value.held, axis, keep)


@Held.implements(F.softmax)
def _(func, value, along):
    return func(value.unwrap("held"), dim=along)


X = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
CALLS = {
    "the last": lambda w: F.linear(X, weight=w),
    "in another order": lambda w: F.linear(bias=X[0], weight=w, input=X),
    "after a default": lambda w: torch.argmax(w, keepdim=True),
    "of a method": lambda w: w.sum(dim=1),
    "of a method, two": lambda w: w.sum(keepdim=True, dim=1),
    "of the first": lambda w: torch.sum(input=w, dim=0),
    "of a function in Python": lambda w: F.softmax(w, dim=1),
    "all, of a function in Python": lambda w: F.softmax(input=w, dim=0),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("call", CALLS)
def test_keywords_come_by_position(call, door):
    torch.testing.assert_close(DOORS[door](CALLS[call])(Held(X)), CALLS[call](X))


def test_what_the_rule_has_no_place_for_is_an_error():
    with pytest.raises(TypeError, match=r"^torch\.sum on a Held: .*unexpected keyword argument 'dtype'"):
        torch.sum(Held(X), dtype=torch.float64)
    with pytest.raises(TypeError, match=r"softmax on a Held: .*unexpected keyword argument 'dtype'"):
        F.softmax(Held(X), dim=1, dtype=torch.float64)


@pytest.mark.parametrize(
    "rule",
    [
        lambda func, input, weight, bias=None: input,
        lambda func, *args, **kwargs: args,
        lambda func, x=None, **kwargs: x,
    ],
)
def test_rules_that_take_them_are_called_as_they_are(rule):
    assert with_keyword_names(F.linear, rule, taken_by(rule)) is rule


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: torch.matmul(x, y),
        lambda x, y: torch.matmul(x, other=y),
        lambda x, y: torch.matmul(input=x, other=y),
        lambda x, y: x.matmul(other=y),
    ],
)
def test_a_rule_that_takes_all_keywords_gets_what_it_requires(call):
    class Factor(TensorSubclass):
        held: Tensor = inner()

    @Factor.implements(torch.matmul)
    def rule(func, one, two, **options):
        assert not options
        return func(one.unwrap("held"), two)

    x, y = torch.rand(2, 3), torch.rand(3, 4)
    assert torch.equal(call(Factor(x), y), x @ y)


def test_a_rule_that_takes_all_keywords_gets_the_others():
    class Factor(TensorSubclass):
        held: Tensor = inner()

    @Factor.implements(torch.matmul)
    def rule(func, one, two, **options):
        return options

    out = torch.empty(2, 4)
    assert torch.matmul(Factor(torch.rand(2, 3)), other=torch.rand(3, 4), out=out) == {"out": out}


def test_errors_name_the_authors_code():
    class Failing(TensorSubclass):
        held: Tensor = inner()

    @Failing.implements(torch.add)
    def refuse(func, one, two):
        raise TypeError("of the author")

    with pytest.raises(
        RuntimeError, match=r"the rule .*refuse \(.*test_keyword_names\.py:\d+\) raised TypeError"
    ):
        Failing(torch.ones(2)) + 1
    with pytest.raises(SpecError, match=r"two rules for .*refuse \(.*test_keyword_names\.py:\d+\) and"):
        Failing.implements(torch.add)(lambda func, one, two: one)


@pytest.mark.parametrize("door", DOORS)
def test_names_of_numpy(door):
    """Functions in C take them too, and pass them on as they are."""

    class Factor(TensorSubclass):
        held: Tensor = inner()

    @Factor.implements(torch.mean)
    def _(func, x, dim=None, keepdim=False):
        return func(x.unwrap("held"), dim, keepdim)

    @Factor.implements(torch.cumsum)
    def _(func, x, along):
        return func(x.unwrap("held"), along)

    @Factor.implements(torch.concatenate)
    def _(func, tensors, dim=0):
        return func([t.unwrap("held") for t in tensors], dim)

    def fn(x):
        one, other = torch.mean(x, axis=1, keepdims=True), torch.cumsum(x, axis=1)
        return one, other, torch.concatenate([x, x], axis=1)

    t = torch.rand(2, 3)
    for got, want in zip(DOORS[door](fn)(Factor(t)), fn(t), strict=True):
        assert torch.equal(got, want)


def test_a_default_that_the_rule_requires_is_passed():
    class Factor(TensorSubclass):
        held: Tensor = inner()

    @Factor.implements(F.dropout)
    def _(func, x, p, train, in_place):
        return p, train, in_place

    assert F.dropout(Factor(torch.ones(2)), p=0.3, training=False) == (0.3, False, False)


def test_names_of_numpy_for_a_rule_that_takes_all_keywords():
    class Factor(TensorSubclass):
        held: Tensor = inner()

    @Factor.implements(torch.sum)
    def _(func, x, dim=None, keepdim=False, **options):
        assert not options
        return func(x.held, dim, keepdim)

    assert torch.sum(Factor(torch.ones(2, 3)), axis=1, keepdims=True).shape == (2, 1)
