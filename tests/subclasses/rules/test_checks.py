"""Registration of rules: valid keys, and rules that cannot take the arguments of their op."""

from __future__ import annotations

import functools
import math
import operator
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import (
    get_overridable_functions,
    handle_torch_function,
    has_torch_function_unary,
    wrap_torch_function,
)

from subclasses import DispatchError, SpecError
from subclasses.rules.checks import is_dispatchable
from tests.subclasses.subjects import declare
from tests.tables import giving, raising

aten = torch.ops.aten


def own(x):
    return x * 2


@wrap_torch_function(lambda x: (x,))
def asking(x):
    return x * 2


def asking_by_hand(x):
    return handle_torch_function(asking_by_hand, (x,), x) if has_torch_function_unary(x) else x


class Asking:
    __name__ = "asking"

    def __call__(self, x):
        return handle_torch_function(self, (x,), x) if has_torch_function_unary(x) else x


class Function(torch.autograd.Function):
    pass


@torch.library.custom_op("rule_checks::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


# ---- functions that torch can dispatch ---------------------------------------------------------------------


def answers(key, of=None):
    """A value whose rule for a key answers a word."""
    return declare(name="Box", rules={key: lambda func, *args: "ruled"})(torch.ones(2, dtype=of))


@pytest.mark.parametrize("function", [asking, asking_by_hand, Asking()])
def test_a_function_of_ones_own_that_asks(function):
    assert function(answers(function)) == "ruled"
    assert torch.is_tensor(function(torch.ones(2)))


NEVER = {
    "own": (own, r"write `@Box\.implements\(torch\.add\)`"),
    "lambda": (lambda x: x, "wrap_torch_function"),
    "builtin": (len, "Name a function of torch"),
    "math": (math.sqrt, "the function sqrt of math"),
    "operator": (operator.add, "Name a function of torch"),
    "method of another class": (str.join, "Name a function of torch"),
    "partial": (functools.partial(torch.add, 1), "Name a function of torch"),
    "module": (nn.ReLU(), "A module calls functions in its forward"),
    "bound": (torch.ones(2).add, r"torch\.Tensor\.add"),
    "autograd function": (Function.apply, "the functions of torch that it calls dispatch"),
    "custom op": (double, r"torch\.ops\.my_library\.my_op"),
    "composed": (F.sigmoid, "the functions of torch that it calls dispatch"),
    "compile": (torch.compile, "the function compile of torch"),
    "numbers": (
        torch.ops.aten.mul.default,
        r"takes no tensor; name torch\.ops\.aten\.mul, for aten\.mul\.Tensor",
    ),
    "factory": (torch.ops.aten.zeros.default, "takes no tensor; name one that does"),
}


@pytest.mark.parametrize("case", NEVER)
def test_what_torch_never_asks_for_is_refused_before_the_rule_is_given(case):
    key, words = NEVER[case]
    Box = declare(name="Box")
    with pytest.raises(SpecError, match=rf"Box\.implements: torch never calls a rule for .*{words}"):
        Box.implements(torch.sum, key)
    assert Box.__torch_function__ is torch._C._disabled_torch_function_impl


def test_every_function_that_torch_lists_is_accepted():
    functions = [
        f for group in get_overridable_functions().values() for f in group if not isinstance(f, type)
    ]
    assert len(functions) > 1000
    assert [f for f in functions if not is_dispatchable(f)] == []


def test_methods_and_getters_of_tensor_are_accepted():
    for key in (Tensor.add, Tensor.shape.__get__, Tensor.__getitem__, Tensor.__iter__, Tensor.T.__get__):
        assert is_dispatchable(key), key


# ---- operators ---------------------------------------------------------------------------------------------


# A method that its operator does not name, the operator, and the function that it names.
UNNAMED = [
    (Tensor.__add__, lambda x: x + 1, "torch.add"),
    (Tensor.__rmul__, lambda x: 2 * x, "torch.mul"),
    (Tensor.__truediv__, lambda x: x / 2, "torch.div"),
    (Tensor.__mod__, lambda x: x % 2, "torch.remainder"),
    (Tensor.__matmul__, lambda x: x @ x, "torch.matmul"),
    (Tensor.__le__, lambda x: x <= 1, "torch.le"),
    (Tensor.__isub__, lambda x: operator.isub(x, 1), "torch.Tensor.sub_"),
    (Tensor.__rand__, lambda x: True & x, "torch.bitwise_and"),
]
test_a_method_that_an_operator_does_not_name_is_refused_with_the_one_it_names = raising(
    [
        (
            lambda method=method: answers(method),
            SpecError,
            rf"never calls a rule for Tensor\.__\w+__, .*name {re.escape(named)}$",
        )
        for method, _, named in UNNAMED
    ]
)


Opaque = type("Opaque", (), {"__signature__": "none", "__call__": lambda self, *args: "ruled"})
test_a_rule_that_runs = giving(
    {
        "without a signature, which is not judged": (
            lambda: torch.cos(declare(rules={torch.cos: Opaque()})(torch.ones(2))),
            "ruled",
        ),
        "for a custom op, named as an op": (
            lambda: double(
                declare(rules={torch.ops.rule_checks.double: lambda func, x: type(x)(func(x.held) + 1)})(
                    torch.ones(2)
                )
            ).held.tolist(),
            [3, 3],
        ),
        **{
            f"for {named}, which an operator names": (
                lambda run=run, named=named: run(
                    answers(
                        operator.attrgetter(named.removeprefix("torch."))(torch),
                        torch.bool if "bitwise" in named else None,
                    )
                ),
                "ruled",
            )
            for _, run, named in UNNAMED
        },
        **{
            f"for Tensor.{method.__name__}, which an operator names": (
                lambda method=method, run=run: run(answers(method)),
                "ruled",
            )
            for method, run in [
                (Tensor.__eq__, lambda x: x == 1),
                (Tensor.__rsub__, lambda x: 1 - x),
                (Tensor.__lshift__, lambda x: x << 1),
                (Tensor.__getitem__, lambda x: x[0]),
                (Tensor.__floordiv__, lambda x: x // 2),
                (Tensor.__ipow__, lambda x: operator.ipow(x, 2)),
                (Tensor.__pow__, lambda x: x**2),
            ]
        },
    }
)


# ---- rules -------------------------------------------------------------------------------------------------


def forgets(func, *args, **kwargs):
    func(*(x.held for x in args))


UNFIT = [
    ("no function", SpecError, r"expected a function as the rule .*got 'no function'"),
    (
        lambda func, types, args=(), kwargs=None: func(*args),
        SpecError,
        "has the parameters of a __torch_dispatch__",
    ),
    (forgets, DispatchError, "returned None for these arguments"),
    (lambda func, x, y: x, TypeError, "its rule missing 1 required positional argument: 'y'; a rule "),
    (lambda x: x, TypeError, "its rule takes 1 positional argument but 2 were given; a rule "),
    (lambda x, bias=0: x.held + bias, AttributeError, "has no attribute 'held'"),
]


@pytest.mark.parametrize("key", [aten.cos.default, aten.cos, torch.cos])
@pytest.mark.parametrize(("rule", "error", "words"), UNFIT)
def test_a_rule_that_does_not_fit_is_an_error_at_once_or_at_the_call(key, rule, error, words):
    with pytest.raises(error, match=words) as caught:
        torch.cos(declare(rules={key: rule})(torch.ones(2)))
    if error is AttributeError:
        assert "The first parameter of a rule is the function" in caught.value.__notes__[0]
