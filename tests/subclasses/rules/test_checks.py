"""What a rule may be registered for, and which rules can take the arguments of their op."""

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

from subclasses import SpecError, TensorSubclass, arithmetic, inner
from subclasses.rules.checks import is_dispatchable

aten = torch.ops.aten


def fresh():
    class Box(TensorSubclass):
        held: Tensor = inner()

    return Box


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


# ---- what torch can ask for --------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [asking, asking_by_hand, Asking()])
def test_a_function_of_ones_own_that_asks(function):
    Box = fresh()
    Box.implements(function)(lambda func, x: "ruled")
    assert function(Box(torch.ones(2))) == "ruled"
    assert torch.is_tensor(function(torch.ones(2)))


def test_a_custom_op_is_named_as_an_op():
    Box = fresh()
    Box.implements(torch.ops.rule_checks.double)(lambda func, x: Box(func(x.held) + 1))
    assert double(Box(torch.ones(2))).held.tolist() == [3, 3]


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
    "autograd function": (Function.apply, "the functions of torch that it calls ask"),
    "custom op": (double, r"torch\.ops\.my_library\.my_op"),
    "composed": (F.sigmoid, "the functions of torch that it calls ask"),
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
    Box = fresh()
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


# ---- what a rule can take ----------------------------------------------------------------------------------


FITTING = [
    (aten.mul.Tensor, lambda func, x, y: x),
    (aten.mul.Tensor, lambda func, *args: None),
    (aten.add.Tensor, lambda func, x, y, alpha=1: x),
    (aten.add.Tensor, lambda func, x, y, **kwargs: x),
    (aten.sum, lambda func, x: x),
    (aten.sum, lambda func, x, dim, keepdim=False: x),
    (torch.Tag.pointwise, lambda func, x: x),
    (torch.add, lambda func, x, y: x),
    (torch.take_along_dim, lambda func, x, index, dim: x),
    (Tensor.view, lambda func, x, rows, columns: x),
    (F.linear, lambda func, x, w, bias=None: x),
    (F.softmax, lambda func, x, dim, **kwargs: x),
    (torch.einsum, lambda func, *args: None),
    (torch.Tensor.T.__get__, lambda func, x: x),
    (asking, lambda func, x: x),
    (aten.mul.Tensor, functools.partial(lambda extra, func, x, y: x, None)),
]


@pytest.mark.parametrize(("key", "rule"), FITTING)
def test_rules_that_fit(key, rule):
    fresh().implements(key)(rule)


@pytest.mark.parametrize(
    ("method", "run", "named"),
    [
        (Tensor.__add__, lambda x: x + 1, "torch.add"),
        (Tensor.__rmul__, lambda x: 2 * x, "torch.mul"),
        (Tensor.__truediv__, lambda x: x / 2, "torch.div"),
        (Tensor.__mod__, lambda x: x % 2, "torch.remainder"),
        (Tensor.__matmul__, lambda x: x @ x, "torch.matmul"),
        (Tensor.__le__, lambda x: x <= 1, "torch.le"),
        (Tensor.__isub__, lambda x: operator.isub(x, 1), "torch.Tensor.sub_"),
        (Tensor.__rand__, lambda x: True & x, "torch.bitwise_and"),
    ],
)
def test_a_method_that_an_operator_does_not_name_is_refused_with_the_one_it_names(method, run, named):
    Box = fresh()
    with pytest.raises(
        SpecError, match=rf"never calls a rule for Tensor\.__\w+__, .*name {re.escape(named)}$"
    ):
        Box.implements(method)(lambda func, x, y: "ruled")
    Box.implements(operator.attrgetter(named.removeprefix("torch."))(torch))(lambda func, x, y: "ruled")
    assert run(Box(torch.ones(2, dtype=torch.bool if "bitwise" in named else None))) == "ruled"


@pytest.mark.parametrize(
    ("method", "run"),
    [
        (Tensor.__eq__, lambda x: x == 1),
        (Tensor.__rsub__, lambda x: 1 - x),
        (Tensor.__lshift__, lambda x: x << 1),
        (Tensor.__getitem__, lambda x: x[0]),
        (Tensor.__floordiv__, lambda x: x // 2),
        (Tensor.__ipow__, lambda x: operator.ipow(x, 2)),
        (Tensor.__pow__, lambda x: x**2),
    ],
)
def test_a_rule_for_a_method_that_an_operator_names_runs(method, run):
    Box = fresh()
    Box.implements(method)(lambda func, x, y: "ruled")
    assert run(Box(torch.ones(2))) == "ruled"


UNFIT = [
    (aten.mul.Tensor, lambda func, x: x, r"aten::mul\.Tensor\(Tensor self, Tensor other\)"),
    (aten.mul.Tensor, lambda x, y: x, r"<lambda>\(x, y\)"),
    (aten.mul.Tensor, lambda func, x, y, z: x, r"\(func, x, y, z\)"),
    (aten.add.Tensor, lambda func, x, y, alpha: x, "gives them a default too"),
    (aten.mul, lambda func, x: x, "the rule for aten.mul is"),
    (torch.add, lambda func, x: x, "add is .*Tensor other"),
    (F.linear, lambda x, w: x, "Tensor weight"),
    (F.softmax, lambda func: 1, r"softmax\(input"),
    (asking, lambda func, x, y: x, r"asking\(x\)"),
]


@pytest.mark.parametrize(("key", "rule", "words"), UNFIT)
def test_rules_that_cannot_take_the_arguments(key, rule, words):
    Box = fresh()
    with pytest.raises(SpecError, match=words):
        Box.implements(key)(rule)
    Box.implements(key)(lambda func, *args, **kwargs: "ruled")


def test_a_rule_without_a_signature_is_not_judged():
    class Opaque:
        __signature__ = "none"

        def __call__(self, *args):
            return "ruled"

    Box = fresh()
    Box.implements(torch.cos)(Opaque())
    assert torch.cos(Box(torch.ones(2))) == "ruled"


def forgets(func, *args, **kwargs):
    if kwargs:
        raise ValueError
    func(*args)


def gives_none_in_one_way(func, *args, **kwargs):
    if kwargs:
        return None
    return func(*args)


def refuses(func, *args, **kwargs):
    raise ValueError


def gives_none_sometimes(func, *args, **kwargs):
    return func(*args) if args else None


@functools.wraps(forgets)
def returns_around(*args, **kwargs):
    return forgets(*args, **kwargs) or args[0]


@pytest.mark.parametrize(
    "key", [aten.neg.default, aten.mul, arithmetic, torch.sum, F.linear, aten.add_.Tensor]
)
def test_a_rule_that_forgets_its_return_is_refused(key):
    with pytest.raises(SpecError, match=r"rule forgets for .* returns nothing, and callers expect a result"):
        fresh().implements(key)(forgets)


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        (aten.neg.default, gives_none_in_one_way),
        (aten.neg.default, refuses),
        (aten.neg.default, gives_none_sometimes),
        (aten.neg.default, returns_around),
        (torch._assert_async, forgets),
        (aten.neg.default, lambda func, x: x),
        (aten._foreach_neg_.default, forgets),  # it has no result
        (torch.Tensor.__setitem__, forgets),
        (torch.Tensor.backward, forgets),
    ],
)
def test_a_rule_that_may_return_nothing(key, rule):
    fresh().implements(key)(rule)


@pytest.mark.parametrize(
    ("key", "rule", "call"),
    [
        (F.linear, lambda x, w, bias=None: x, r"def rule\(func, input, weight, bias=None\)"),
        (torch.ops.aten.mul.Tensor, lambda x, other: x, r"def rule\(func, self, other\)"),
    ],
)
def test_a_rule_without_a_parameter_for_the_function(key, rule, call):
    class Box(TensorSubclass):
        held: Tensor = inner()

    with pytest.raises(SpecError, match=f"a rule takes the function before its arguments: {call}"):
        Box.implements(key)(rule)
    Box.implements(key)(lambda fun, x, other=None, bias=None: x)  # names of its own
