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
from subclasses import DispatchError, TensorSubclass, inner

aten = torch.ops.aten


class Base(TensorSubclass, fallback="materialize"):
    held: Tensor = inner()

    def materialize(self):
        return self.held


def faulty(*ops: object) -> type:
    """A class whose rule for ops raises a TypeError."""

    class Faulty(Base):
        pass

    @Faulty.implements(*ops)
    def rule(func, x, y):
        return Faulty(torch.softmax(x.held))

    return Faulty


def endless(*ops: object) -> type:
    """A class whose rule for ops calls the op with its own arguments."""

    class Endless(Base):
        pass

    @Endless.implements(*ops)
    def rule(func, x, y):
        return func(x, y)

    return Endless


# ---- a TypeError below an operator ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "call"),
    [
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
    ],
)
def test_a_type_error_of_a_rule_is_not_swallowed(op, call):
    cls = faulty(op)
    x = cls(torch.ones(2, 2))
    with pytest.raises(RuntimeError, match=r"on a Faulty: the rule .*rule .*raised TypeError: softmax\(\)"):
        call(x, x)


def test_a_type_error_of_materialize_is_not_swallowed():
    class Faulty(Base):
        def materialize(self):
            return torch.softmax(self.held)

    x = Faulty(torch.ones(2))
    with pytest.raises(RuntimeError, match=r"Faulty: materialize\(\) raised TypeError: softmax"):
        x == x  # noqa: B015


def test_other_type_errors_stay():
    cls = faulty(torch.add)
    with pytest.raises(TypeError, match="unsupported operand"):
        cls(torch.ones(2)) + object()
    with pytest.raises(TypeError, match=r"must be (Number|Tensor), not list"):
        torch.mul(cls(torch.ones(2)), [])
    # What no operator calls reaches the caller as it is.
    with pytest.raises(TypeError, match=r"softmax\(\) missing"):
        torch.add(cls(torch.ones(2)), cls(torch.ones(2)))
    with pytest.raises(TypeError, match=r"softmax\(\) missing"):
        torch.maximum((named := faulty(torch.maximum))(torch.ones(2)), named(torch.ones(2)))


# ---- a rule that calls itself --------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_garbage_collection")
@pytest.mark.parametrize("op", [aten.add.Tensor, aten.add, torch.add])
def test_a_rule_that_calls_itself_is_named(op):
    cls = endless(op)
    with pytest.raises(
        RecursionError, match=r"on an Endless: the rule .*calls itself.*as x\.unwrap\(\) gives them"
    ):
        cls(torch.ones(2)) + 1


@pytest.mark.parametrize("same", [lambda x: x, lambda x: x.detach()])
def test_a_materialize_that_returns_the_value_is_named(same):
    class Endless(Base):
        def materialize(self):
            return same(self)

    with pytest.raises(
        ValueError, match=r"Endless\.materialize: expected a plain tensor, .*as in self\.held"
    ):
        Endless(torch.ones(2)).sum()


def test_a_rule_without_an_argument_of_its_op_is_told_which_it_takes():
    class Short(TensorSubclass):
        held: Tensor = inner()

    Short.implements(aten.add.Tensor)(lambda func, x, y: Short(func(x.held, y)))
    Short.implements(aten.softplus.default)(lambda func, x: Short(func(x.held)))
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
    class Short(TensorSubclass, fallback="map"):
        held: Tensor = inner()

    @Short.implements(subclasses.reductions)
    def _(func, x, dim, keepdim):
        return Short(func(x.held, dim, keepdim=keepdim))

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
def test_a_materialize_that_calls_itself_is_named():
    class Endless(Base):
        def materialize(self):
            return self * 2

    with pytest.raises(
        RecursionError, match=r"aten\.mul\.Tensor on an Endless: materialize\(\) calls itself"
    ):
        Endless(torch.ones(2)).sum()


@pytest.mark.usefixtures("without_garbage_collection")
@pytest.mark.parametrize(
    "compiled", [lambda f: torch.compile(f, backend="eager"), lambda f: desugar.compile(f, backend="eager")]
)
def test_a_compiled_call_names_it_too(compiled):
    cls = endless(aten.add.Tensor)
    with pytest.raises(Exception, match=r"calls itself without end"):
        compiled(lambda x: x + 1)(cls(torch.ones(2)))


def test_nested_values_may_run_a_rule_in_itself():
    class Twice(Base):
        pass

    @Twice.implements(aten.add.Tensor)
    def rule(func, x, y):
        return Twice(func(x.held, y))

    x = Twice(torch.ones(2))
    for _ in range(30):
        x = Twice(x)
    y = x + 1
    for _ in range(31):
        y = y.held
    assert y.tolist() == [2.0, 2.0]


@pytest.mark.usefixtures("without_garbage_collection")
def test_another_recursion_stays_what_it_is():
    class Recursing(Base):
        pass

    def forever(n):
        return forever(n + 1)

    @Recursing.implements(aten.add.Tensor)
    def rule(func, x, y):
        return forever(0)

    with pytest.raises(RecursionError, match=r"^maximum recursion"):
        Recursing(torch.ones(2)) + 1


# ---- what a rule for a derivative needs ----------------------------------------------------------------------


def test_a_missing_derivative_is_named_with_the_way_around_it():
    class Relu(TensorSubclass):
        held: Tensor = inner(differentiable=True)

    @Relu.implements(aten.relu)
    def below(func, x):
        return Relu(func(x.held))

    held = torch.ones(2, requires_grad=True)
    with pytest.raises(DispatchError, match=r"threshold_backward.*registered for the function.*unwrap"):
        aten.threshold_backward.default(torch.ones(2), Relu(held.detach()), 0.0)  # as PyTorch's formula does
    Relu(held).relu().held.sum().backward()  # the rule's own derivative
    assert held.grad.tolist() == [1.0, 1.0]
    held.grad = None

    class Above(TensorSubclass):
        held: Tensor = inner(differentiable=True)

    @Above.implements(torch.relu)
    def above(func, x):
        return Above(func(x.unwrap("held")))

    Above(held).relu().held.sum().backward()
    assert held.grad.tolist() == [1.0, 1.0]


def test_an_operand_of_another_kind_is_asked():
    class Duck:
        @classmethod
        def __torch_function__(cls, *args):
            return NotImplemented

        def __radd__(self, other):
            return "radd"

    cls = type("Asking", (Base,), {})
    cls.implements(torch.add)(lambda func, x, y: func(x.unwrap("held"), y))
    assert cls(torch.ones(3)) + Duck() == "radd"


def test_an_error_keeps_no_tensors_alive():
    cls = faulty(torch.maximum)
    x = cls(torch.ones(2))
    held = weakref.ref(x.held)
    gc.disable()
    try:
        with contextlib.suppress(TypeError):
            torch.maximum(x, x)
        del x
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["partial", "object"])
def test_rules_that_are_no_functions_are_named_too(kind):
    class Rule:
        def __call__(self, func, x, y):
            return torch.softmax(x.held)

    def rule(scale, func, x, y):
        return torch.softmax(x.held)

    cls = type("Named", (Base,), {})
    cls.implements(aten.add.Tensor)(Rule() if kind == "object" else functools.partial(rule, 2))
    with pytest.raises(RuntimeError, match=r"on a Named: the rule .*raised TypeError: softmax"):
        cls(torch.ones(2)) + cls(torch.ones(2))


# ---- tensors from outside of the class -----------------------------------------------------------------------

TABLE = torch.tensor([1.0, 2.0])


def test_a_tensor_of_the_module_under_a_compiler():
    class Outside(TensorSubclass, fallback="materialize"):
        held: Tensor = inner()

        def materialize(self):
            return self.held * TABLE

    x = Outside(torch.ones(2))
    assert (x + 1).tolist() == [2, 3]
    for door in (desugar.compile, torch.compile):
        with pytest.raises(
            RuntimeError, match=r"materialize\(\) computes with a tensor from outside"
        ) as caught:
            door(lambda x: x + 1, backend="eager" if door is desugar.compile else "aot_eager")(x)
        assert "write `table = constant([...])` in the class body" in str(caught.value)


def test_a_tensor_of_an_enclosing_function_under_a_compiler():
    class Outside(Base):
        pass

    table = torch.tensor([1.0, 2.0])

    @Outside.implements(aten.mul.Tensor)
    def rule(func, x, y):
        return func(x.held, table)

    with pytest.raises(RuntimeError, match=r"the rule .*rule .* computes with a tensor from outside"):
        desugar.compile(lambda x: x * 2, backend="eager", fullgraph=True)(Outside(torch.ones(2)))


def test_an_assertion_of_the_author_stays_as_it_is():
    class Asserts(Base):
        pass

    @Asserts.implements(aten.mul.Tensor)
    def rule(func, x, y):
        assert y == 3, "three, please"
        return x.held

    with pytest.raises(AssertionError, match="three, please"):
        Asserts(torch.ones(2)) * 2
