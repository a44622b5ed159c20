"""Errors in an author's rules that operators would swallow, or that would run to Python's limit."""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import sys
import types
import weakref

import pytest
import torch
from torch import Tensor

import desugar
import subclasses
from subclasses import DispatchError, inner
from tests.subclasses.subjects import MODES as DOORS, declare
from tests.tables import giving, raising

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


test_other_type_errors_stay = raising(
    [
        (lambda: faulty(torch.add)(torch.ones(2)) + object(), TypeError, "unsupported operand"),
        (
            lambda: torch.mul(faulty(torch.add)(torch.ones(2)), []),
            TypeError,
            r"must be (Number|Tensor), not list",
        ),
        # Without an operator, the rule's error reaches the caller unchanged.
        *(
            (
                lambda function=function: function(*[faulty(function)(torch.ones(2))] * 2),
                TypeError,
                r"softmax\(\) missing",
            )
            for function in (torch.add, torch.maximum)
        ),
    ]
)


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


def materializing(materialize, call=Tensor.sum):
    """A call with a value of a class with this `materialize`."""
    return lambda: call(declare(Base, materialize=materialize)(torch.ones(2)))


# ---- a rule that calls itself --------------------------------------------------------------------------------


OF_FAMILY = declare(
    name="Short",
    keywords={"fallback": "map"},
    rules={subclasses.reductions: lambda func, x, dim, keepdim: type(x)(func(x.held, dim, keepdim=keepdim))},
)
OF_OP = declare(OF_FAMILY, rules={aten.sum: lambda func, x, dim: type(x)(func(x.held, dim))})
SHORT = declare(
    name="Short",
    rules={
        aten.add.Tensor: lambda func, x, y: type(x)(func(x.held, y)),
        aten.softplus.default: lambda func, x: type(x)(func(x.held)),
    },
)
test_what_rules_give = giving(
    {
        "to an operand of another kind, which is asked": (
            lambda: (
                with_rule(lambda func, x, y: func(x.unwrap("held"), y), torch.add)(torch.ones(3)) + Duck()
            ),
            "radd",
        ),
        "by an op, without an argument": (lambda: (SHORT(torch.ones(2)) + 1).held.tolist(), [2.0, 2.0]),
        "by a family, without an argument": (
            lambda: OF_FAMILY(torch.ones(2, 2)).sum(0).held.tolist(),
            [2.0, 2.0],
        ),
    }
)
test_a_rule_that_lacks_an_argument_is_told_how_it_is_called = raising(
    {
        "of an op, which an operator may have called": (
            lambda: torch.add(SHORT(torch.ones(2)), 1, alpha=2),
            RuntimeError,
            r"aten\.add\.Tensor on a Short: its rule got an unexpected keyword argument 'alpha'.*Scalar alpha=1",
        ),
        "of another op": (
            lambda: torch.nn.functional.softplus(SHORT(torch.ones(2)), 2),
            TypeError,
            r"softplus\.default on a Short: its rule takes 2 positional arguments but 3",
        ),
        "of a family": (
            lambda: OF_FAMILY(torch.ones(2, 2)).sum(0, dtype=torch.float64),
            TypeError,
            r"'dtype'; a rule for subclasses\.reductions is called as rule\(func, x, dim, keepdim, \*\*kwargs\)$",
        ),
        "of an op of a family": (
            lambda: OF_OP(torch.ones(2, 2)).sum(0, dtype=torch.float64),
            TypeError,
            "a rule takes the arguments of its op",
        ),
    }
)


def test_nested_values_may_run_a_rule_in_itself():
    Twice = with_rule(lambda func, x, y: Twice(func(x.held, y)), aten.add.Tensor)
    x = torch.ones(2)
    for _ in range(31):
        x = Twice(x)
    y = x + 1
    for _ in range(31):
        y = y.held
    assert y.tolist() == [2.0, 2.0]


# ---- rules that a derivative needs ---------------------------------------------------------------------------


@pytest.mark.parametrize("key", [aten.relu, torch.relu])
def test_a_missing_derivative_is_named_with_the_way_around_it(key):
    Relu = declare(held=inner(differentiable=True), rules={key: lambda func, x: type(x)(func(x.held))})
    held = torch.ones(2, requires_grad=True)
    with pytest.raises(DispatchError, match=r"threshold_backward.*for the function.*unwrap"):
        aten.threshold_backward.default(torch.ones(2), Relu(held.detach()), 0.0)  # as PyTorch's formula does
    Relu(held).relu().held.sum().backward()  # the rule's own derivative
    assert held.grad.tolist() == [1.0, 1.0]


class Duck:
    @classmethod
    def __torch_function__(cls, *args):
        return NotImplemented

    def __radd__(self, other):
        return "radd"


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


# ---- messages --------------------------------------------------------------------------------------------------


def forever(func, x, y):
    return forever(func, x, y)


def asserting(func, x, y):
    assert y == 3, "three, please"


class Rule:
    def __call__(self, func, x, y):
        return softmax_of(func, x, y)


def adding(cls):
    return lambda: cls(torch.ones(2)) + 1


def compiled(compiler):
    add = lambda x: x + 1  # noqa: E731
    return lambda: compiler(add, backend="eager")(endless(aten.add.Tensor)(torch.ones(2)))


ENDLESS = r"on an Endless: the rule .*calls itself.*inner tensors, x\.unwrap\(\)"
NO_PLAIN = r"Made\.materialize: expected a plain tensor, .*as in self\.held"
RAISED = r"on a Named: the rule .*raised TypeError: softmax"
test_the_error_of_a_rule_or_of_materialize = pytest.mark.usefixtures("without_garbage_collection")(
    raising(
        {
            "a rule for an overload that calls itself": (
                adding(endless(aten.add.Tensor)),
                RecursionError,
                ENDLESS,
            ),
            "a rule for a packet that calls itself": (adding(endless(aten.add)), RecursionError, ENDLESS),
            "a rule for a function that calls itself": (adding(endless(torch.add)), RecursionError, ENDLESS),
            "a compiled call": (compiled(torch.compile), Exception, r"calls itself without end"),
            "a call compiled by desugar": (compiled(desugar.compile), Exception, r"calls itself without end"),
            "another recursion": (
                adding(with_rule(forever, aten.add.Tensor)),
                RecursionError,
                r"^maximum recursion",
            ),
            "a partial as a rule": (
                adding(with_rule(functools.partial(softmax_of), aten.add.Tensor, name="Named")),
                RuntimeError,
                RAISED,
            ),
            "an object as a rule": (
                adding(with_rule(Rule(), aten.add.Tensor, name="Named")),
                RuntimeError,
                RAISED,
            ),
            "an assertion of the author": (
                adding(with_rule(asserting, aten.add.Tensor)),
                AssertionError,
                "three, please",
            ),
            "a TypeError of materialize": (
                materializing(lambda self: torch.softmax(self.held), lambda x: x == x),
                RuntimeError,
                r"Made: materialize\(\) raised TypeError: softmax",
            ),
            "a materialize that returns the value": (materializing(lambda self: self), ValueError, NO_PLAIN),
            "a materialize that detaches the value": (
                materializing(lambda self: self.detach()),
                ValueError,
                NO_PLAIN,
            ),
            "a materialize that calls itself": (
                materializing(lambda self: self * 2),
                RecursionError,
                r"aten\.mul\.Tensor on a Made: materialize\(\) calls itself",
            ),
        }
    )
)


# ---- a class statement that runs twice, as a cell of a notebook does ---------------------------------------

CELL = """
import torch
from torch import Tensor
from subclasses import TensorSubclass, inner

class Scaled(TensorSubclass, fallback="materialize"):
    raw: Tensor = inner()

    def materialize(self):
        return self.raw * 2

@Scaled.implements(torch.ops.aten.mul)
def _(func, x, y):
    return func(*(t.materialize() if isinstance(t, Scaled) else t for t in (x, y)))
"""


def run_cell(module, text=CELL):
    exec(text, module.__dict__)  # noqa: S102 - the text above


@pytest.fixture
def notebook(monkeypatch):
    module = types.ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", module)
    run_cell(module)
    return module


@pytest.mark.usefixtures("without_garbage_collection")
def test_a_value_of_an_earlier_definition(notebook):
    x = notebook.Scaled(notebook.torch.ones(2))
    assert (x * 3).tolist() == [6, 6]
    run_cell(notebook)
    with pytest.raises(RecursionError, match=r"`class Scaled` has run again .* Make the value again"):
        _ = x * 3
    assert (notebook.Scaled(x.raw) * 3).tolist() == [6, 6]


@pytest.mark.usefixtures("without_garbage_collection")
def test_a_rule_that_calls_itself_is_told_so(notebook):
    run_cell(notebook, CELL.replace("t.materialize() if isinstance(t, Scaled) else t", "t"))
    with pytest.raises(RecursionError, match="calls itself without end"):
        _ = notebook.Scaled(notebook.torch.ones(2)) * 3
