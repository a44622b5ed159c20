"""Errors in an author's rules that operators would swallow, or that would run to Python's limit."""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import weakref

import pytest
import torch
from torch import Tensor

import desugar
import subclasses
from subclasses import DispatchError, inner
from tests.subclasses.ragged.judge import raising
from tests.subclasses.subjects import MODES as DOORS, declare

aten = torch.ops.aten


Base = declare(name="Base", keywords={"fallback": "materialize"}, materialize=lambda self: self.held)


def softmax_of(func, x, y):
    return torch.softmax(x.held)


def with_rule(rule, *ops: object, base=Base, name="Made"):
    return declare(base, name=name, rules=dict.fromkeys(ops, rule))


def faulty(*ops: object) -> type:
    """A class whose rule for ops raises a TypeError."""
    return with_rule(softmax_of, *ops, name="Faulty")


def endless(*ops: object) -> type:
    """A class whose rule for ops calls the op with its own arguments."""
    return with_rule(lambda func, x, y: func(x, y), *ops, name="Endless")


def test_other_type_errors_stay():
    cls = faulty(torch.add)
    with pytest.raises(TypeError, match="unsupported operand"):
        cls(torch.ones(2)) + object()
    with pytest.raises(TypeError, match=r"must be (Number|Tensor), not list"):
        torch.mul(cls(torch.ones(2)), [])
    # What no operator calls reaches the caller as it is.
    for function in (torch.add, torch.maximum):
        with pytest.raises(TypeError, match=r"softmax\(\) missing"):
            function((x := faulty(function)(torch.ones(2))), x)


# ---- a TypeError below an operator ---------------------------------------------------------------------------


test_a_type_error_of_a_rule_is_not_swallowed = raising(
    [
        (
            lambda op=op, call=call: call(x := faulty(op)(torch.ones(2, 2)), x),
            RuntimeError,
            r"on a Faulty: the rule softmax_of .*raised TypeError: softmax\(\)",
        )
        for op, call in [
            (aten.add.Tensor, operator.add),
            (aten.add.Tensor, operator.iadd),
            (torch.add, operator.add),
            (aten.add.Tensor, torch.add),  # below dispatch an operator is not told from a call
            (aten.eq.Tensor, operator.eq),
            (torch.eq, operator.eq),
            (torch.remainder, operator.mod),
            (torch.pow, operator.pow),
            (aten.mm, operator.matmul),
            (torch.bitwise_and, operator.and_),
        ]
    ]
)


MATERIALIZE = {
    "a TypeError": (
        lambda self: torch.softmax(self.held),
        lambda x: x == x,
        RuntimeError,
        r"Made: materialize\(\) raised TypeError: softmax",
    ),
    "the value": (
        lambda self: self,
        Tensor.sum,
        ValueError,
        r"Made\.materialize: expected a plain tensor, .*as in self\.held",
    ),
    "the value, detached": (
        lambda self: self.detach(),
        Tensor.sum,
        ValueError,
        r"Made\.materialize: expected a plain tensor, .*as in self\.held",
    ),
    "itself": (
        lambda self: self * 2,
        Tensor.sum,
        RecursionError,
        r"aten\.mul\.Tensor on a Made: materialize\(\) calls itself",
    ),
}


@pytest.mark.usefixtures("without_garbage_collection")
@pytest.mark.parametrize("case", MATERIALIZE)
def test_a_materialize_that_fails_is_named(case):
    materialize, call, error, words = MATERIALIZE[case]
    with pytest.raises(error, match=words):
        call(declare(Base, materialize=materialize)(torch.ones(2)))


# ---- a rule that calls itself --------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_garbage_collection")
@pytest.mark.parametrize("op", [aten.add.Tensor, aten.add, torch.add])
def test_a_rule_that_calls_itself_is_named(op):
    with pytest.raises(
        RecursionError, match=r"on an Endless: the rule .*calls itself.*as x\.unwrap\(\) gives them"
    ):
        endless(op)(torch.ones(2)) + 1


def test_a_rule_without_an_argument_of_its_op_is_told_which_it_takes():
    Short = declare(
        name="Short",
        rules={
            aten.add.Tensor: lambda func, x, y: Short(func(x.held, y)),
            aten.softplus.default: lambda func, x: Short(func(x.held)),
        },
    )
    x = Short(torch.ones(2))
    assert (x + 1).held.tolist() == [2.0, 2.0]
    words = (
        r"aten\.add\.Tensor on a Short: its rule got an unexpected keyword argument 'alpha'.*Scalar alpha=1"
    )
    with pytest.raises(RuntimeError, match=words):  # an operator may have called it
        torch.add(x, 1, alpha=2)
    with pytest.raises(
        TypeError, match=r"softplus\.default on a Short: its rule takes 2 positional arguments but 3"
    ):
        torch.nn.functional.softplus(x, 2)


def test_a_rule_of_a_family_is_told_how_the_family_calls_it():
    rule = lambda func, x, dim, keepdim: type(x)(func(x.held, dim, keepdim=keepdim))  # noqa: E731
    Short = declare(keywords={"fallback": "map"}, rules={subclasses.reductions: rule})
    x = Short(torch.ones(2, 2))
    assert x.sum(0).held.tolist() == [2.0, 2.0]
    words = (
        r"'dtype'; a rule for subclasses\.reductions is called as rule\(func, x, dim, keepdim, \*\*kwargs\)$"
    )
    with pytest.raises(TypeError, match=words):
        x.sum(0, dtype=torch.float64)
    Short.implements(aten.sum)(lambda func, x, dim: Short(func(x.held, dim)))
    with pytest.raises(TypeError, match="a rule takes the arguments of its op"):
        x.sum(0, dtype=torch.float64)


@pytest.mark.usefixtures("without_garbage_collection")
@pytest.mark.parametrize("compiler", [torch.compile, desugar.compile])
def test_a_compiled_call_names_it_too(compiler):
    with pytest.raises(Exception, match=r"calls itself without end"):
        compiler(lambda x: x + 1, backend="eager")(endless(aten.add.Tensor)(torch.ones(2)))


def test_nested_values_may_run_a_rule_in_itself():
    Twice = with_rule(lambda func, x, y: Twice(func(x.held, y)), aten.add.Tensor)
    x = torch.ones(2)
    for _ in range(31):
        x = Twice(x)
    y = x + 1
    for _ in range(31):
        y = y.held
    assert y.tolist() == [2.0, 2.0]


def forever(func, x, y):
    return forever(func, x, y)


@pytest.mark.usefixtures("without_garbage_collection")
def test_another_recursion_stays_what_it_is():
    with pytest.raises(RecursionError, match=r"^maximum recursion"):
        with_rule(forever, aten.add.Tensor)(torch.ones(2)) + 1


# ---- what a rule for a derivative needs ----------------------------------------------------------------------


@pytest.mark.parametrize("key", [aten.relu, torch.relu])
def test_a_missing_derivative_is_named_with_the_way_around_it(key):
    rule = lambda func, x: type(x)(func(x.held))  # noqa: E731
    Relu = declare(held=inner(differentiable=True), rules={key: rule})
    held = torch.ones(2, requires_grad=True)
    with pytest.raises(DispatchError, match=r"threshold_backward.*registered for the function.*unwrap"):
        aten.threshold_backward.default(torch.ones(2), Relu(held.detach()), 0.0)  # as PyTorch's formula does
    Relu(held).relu().held.sum().backward()  # the rule's own derivative
    assert held.grad.tolist() == [1.0, 1.0]


class Duck:
    @classmethod
    def __torch_function__(cls, *args):
        return NotImplemented

    def __radd__(self, other):
        return "radd"


def test_an_operand_of_another_kind_is_asked():
    cls = with_rule(lambda func, x, y: func(x.unwrap("held"), y), torch.add)
    assert cls(torch.ones(3)) + Duck() == "radd"


def test_an_error_keeps_no_tensors_alive():
    x = faulty(torch.maximum)(torch.ones(2))
    held = weakref.ref(x.held)
    gc.disable()
    try:
        with contextlib.suppress(TypeError):
            torch.maximum(x, x)
        del x
        assert held() is None
    finally:
        gc.enable()


class Rule:
    def __call__(self, func, x, y):
        return softmax_of(func, x, y)


@pytest.mark.parametrize("rule", [functools.partial(softmax_of), Rule()])
def test_rules_that_are_no_functions_are_named_too(rule):
    x = with_rule(rule, aten.add.Tensor, name="Named")(torch.ones(2))
    with pytest.raises(RuntimeError, match=r"on a Named: the rule .*raised TypeError: softmax"):
        x + x


# ---- tensors from outside of the class -----------------------------------------------------------------------


TABLE = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize("door", ["stock", "desugar"])
def test_a_tensor_of_the_module_under_a_compiler(door):
    cls = declare(keywords={"fallback": "materialize"}, materialize=lambda self: self.held * TABLE)
    x = cls(torch.ones(2))
    assert (x + 1).tolist() == [2, 3]
    words = r"(?s)materialize\(\) computes with a tensor from outside.*write `table = constant\(\[\.\.\.\]\)` in the"
    with pytest.raises(RuntimeError, match=words):
        DOORS[door](lambda x: x + 1)(x)


def test_a_tensor_of_an_enclosing_function_under_a_compiler():
    table = torch.tensor([1.0, 2.0])
    x = with_rule(lambda func, x, y: func(x.held, table), aten.mul.Tensor)(torch.ones(2))
    with pytest.raises(RuntimeError, match=r"the rule .*lambda.* computes with a tensor from outside"):
        desugar.compile(lambda x: x * 2, backend="eager", fullgraph=True)(x)


def asserting(func, x, y):
    assert y == 3, "three, please"


def test_an_assertion_of_the_author_stays_as_it_is():
    with pytest.raises(AssertionError, match="three, please"):
        with_rule(asserting, aten.mul.Tensor)(torch.ones(2)) * 2
