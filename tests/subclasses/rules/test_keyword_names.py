"""Rules whose parameters have other names than PyTorch's functions."""

import pytest
import torch
import torch.nn.functional as F

import desugar
from subclasses import SpecError
from subclasses.rules.keyword_names import taken_by, with_keyword_names
from tests.subclasses.subjects import declare
from tests.tables import giving, raising

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


def factor(key, rule):
    return declare(name="Factor", rules={key: rule})


def of_two(func, one, two, **options):
    assert not options
    return func(one.unwrap("held"), two)


OUT = torch.empty(2, 4)


X3, Y3 = torch.rand(2, 3), torch.rand(3, 4)
test_what_a_rule_gets = giving(
    {
        "others": (
            lambda: torch.matmul(
                factor(torch.matmul, lambda func, one, two, **options: options)(X3), other=Y3, out=OUT
            ),
            {"out": OUT},
        ),
        "a default that the rule requires": (
            lambda: F.dropout(
                factor(F.dropout, lambda func, x, p, train, in_place: (p, train, in_place))(X3),
                p=0.3,
                training=False,
            ),
            (0.3, False, False),
        ),
        "names of numpy": (
            lambda: torch.sum(
                factor(
                    torch.sum, lambda func, x, dim=None, keepdim=False, **options: (dim, keepdim, options)
                )(X3),
                axis=1,
                keepdims=True,
            ),
            (1, True, {}),
        ),
        **{
            f"what it requires, beside all keywords, {number}": (
                lambda call=call: call(factor(torch.matmul, of_two)(X3), Y3).tolist(),
                (X3 @ Y3).tolist(),
            )
            for number, call in enumerate(
                [
                    lambda x, y: torch.matmul(x, y),
                    lambda x, y: torch.matmul(x, other=y),
                    lambda x, y: torch.matmul(input=x, other=y),
                    lambda x, y: x.matmul(other=y),
                ]
            )
        },
        **{
            f"as it is, {number}": (
                lambda rule=rule: with_keyword_names(F.linear, rule, taken_by(rule)) is rule,
                True,
            )
            for number, rule in enumerate(
                [
                    lambda func, input, weight, bias=None: input,
                    lambda func, *args, **kwargs: args,
                    lambda func, x=None, **kwargs: x,
                ]
            )
        },
    }
)


def refuse(func, one, two):
    raise TypeError("of the author")


FAILING = factor(torch.add, refuse)
test_errors_name_the_authors_code = raising(
    [
        (
            lambda: FAILING(torch.ones(2)) + 1,
            RuntimeError,
            r"the rule .*refuse \(.*test_keyword_names\.py:\d+\) raised TypeError",
        ),
        (
            lambda: FAILING.implements(torch.add)(lambda func, one, two: one),
            SpecError,
            r"two rules for .*refuse \(.*test_keyword_names\.py:\d+\) and",
        ),
    ]
)
