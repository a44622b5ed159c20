"""Rules whose parameters have other names than those of PyTorch's functions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import desugar
from subclasses import SpecError
from subclasses.rules.keyword_names import taken_by, with_keyword_names
from tests.subclasses.subjects import declare
from tests.tables import raising

DOORS = {
    "eager": lambda fn: fn,
    "stock": lambda fn: torch.compile(fn, backend="eager", fullgraph=True),
    "desugar": lambda fn: desugar.compile(fn, backend="eager", fullgraph=True),
}


# Rules that return plain tensors.
Held = declare(
    name="Held",
    rules={
        F.linear: lambda func, x, w, b=None: func(x, w.unwrap("held"), b),
        torch.sum: lambda func, value, axes=None, keep=False: func(
            value.unwrap("held"), dim=axes, keepdim=keep
        ),
        torch.argmax: lambda func, value, axis=None, keep=False: func(value.held, axis, keep),
        F.softmax: lambda func, value, along: func(value.unwrap("held"), dim=along),
        torch.mean: lambda func, x, dim=None, keepdim=False: func(x.unwrap("held"), dim, keepdim),
        torch.cumsum: lambda func, x, along: func(x.unwrap("held"), along),
        torch.concatenate: lambda func, tensors, dim=0: func([t.unwrap("held") for t in tensors], dim),
    },
)


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
    # Functions in C take the names of numpy too, and pass them on as they are.
    "names of numpy": lambda w: torch.mean(w, axis=1, keepdims=True),
    "axis": lambda w: torch.cumsum(w, axis=1),
    "axis of a list": lambda w: torch.concatenate([w, w], axis=1),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("call", CALLS)
def test_keywords_come_by_position(call, door):
    torch.testing.assert_close(DOORS[door](CALLS[call])(Held(X)), CALLS[call](X))


test_what_the_rule_has_no_place_for_is_an_error = raising(
    [
        (
            lambda: torch.sum(Held(X), dtype=torch.float64),
            TypeError,
            r"^torch\.sum on a Held: .*unexpected keyword argument 'dtype'",
        ),
        (
            lambda: F.softmax(Held(X), dim=1, dtype=torch.float64),
            TypeError,
            r"softmax on a Held: .*unexpected keyword argument 'dtype'",
        ),
    ]
)


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


def factor(key, rule):
    return declare(name="Factor", rules={key: rule})


def of_two(func, one, two, **options):
    assert not options
    return func(one.unwrap("held"), two)


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
    x, y = torch.rand(2, 3), torch.rand(3, 4)
    assert torch.equal(call(factor(torch.matmul, of_two)(x), y), x @ y)


OUT = torch.empty(2, 4)


@pytest.mark.parametrize(
    ("key", "rule", "call", "expected"),
    [
        (
            torch.matmul,
            lambda func, one, two, **options: options,
            lambda x: torch.matmul(x, other=torch.rand(3, 4), out=OUT),
            {"out": OUT},
        ),
        (
            F.dropout,
            lambda func, x, p, train, in_place: (p, train, in_place),
            lambda x: F.dropout(x, p=0.3, training=False),
            (0.3, False, False),
        ),
        (
            torch.sum,
            lambda func, x, dim=None, keepdim=False, **options: (dim, keepdim, options),
            lambda x: torch.sum(x, axis=1, keepdims=True),
            (1, True, {}),
        ),
    ],
    ids=["others", "a default that the rule requires", "names of numpy"],
)
def test_what_a_rule_gets(key, rule, call, expected):
    assert call(factor(key, rule)(torch.rand(2, 3))) == expected


def refuse(func, one, two):
    raise TypeError("of the author")


def test_errors_name_the_authors_code():
    Failing = factor(torch.add, refuse)
    with pytest.raises(
        RuntimeError, match=r"the rule .*refuse \(.*test_keyword_names\.py:\d+\) raised TypeError"
    ):
        Failing(torch.ones(2)) + 1
    with pytest.raises(SpecError, match=r"two rules for .*refuse \(.*test_keyword_names\.py:\d+\) and"):
        Failing.implements(torch.add)(lambda func, one, two: one)
