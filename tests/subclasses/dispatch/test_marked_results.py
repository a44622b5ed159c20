"""What an author's rule computes from a cotangent is a cotangent: sums of gradients add inner tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import desugar
import subclasses
from subclasses import DispatchError, Outer, TensorSubclass, inner

aten = torch.ops.aten

DOORS = {
    "eager": lambda fn: fn,
    "stock": lambda fn: torch.compile(fn, backend="aot_eager", fullgraph=True),
    "desugar.compile": lambda fn: desugar.compile(fn, backend="eager", fullgraph=True, strict=True),
}


class Log(TensorSubclass, fallback="materialize", kind="structure"):
    """Stands for the exponential of what it holds, so adding two values is not adding what they hold."""

    logs: Tensor = inner(differentiable=True, shape="...")

    def materialize(self):
        return self.logs.exp()


class Bare(TensorSubclass):
    """No fallback, and no rule for what autograd itself calls."""

    values: Tensor = inner(differentiable=True)


@pytest.mark.parametrize("door", DOORS)
def test_a_view_and_the_whole(door):
    def fn(held):
        x = Log(held)
        return (x[0].logs * 2).sum() + x.logs.sum() + x.t()[1].unwrap("logs").sum()

    held = torch.ones(2, 3, requires_grad=True)
    DOORS[door](fn)(held).backward()
    assert held.grad.tolist() == [[3, 4, 3], [1, 2, 1]]


def test_a_list_of_operands():
    held = torch.ones(2, requires_grad=True)
    x = Log(held)
    (torch.cat([x, x]).logs.sum() + x.logs.sum()).backward()
    assert held.grad.tolist() == [3, 3]


def test_a_rule_that_returns_an_operand_leaves_it_as_it_is():
    kept = Log(torch.ones(2))
    Keeps = type("Keeps", (Log,), {})
    Keeps.implements(aten.sin.default)(lambda func, x: kept)
    x = Keeps(torch.ones(2)).requires_grad_()
    x.logs.sum().backward()
    assert x.grad._layout.cotangent and not kept._layout.cotangent


@pytest.mark.parametrize("reduce", [torch.sum, torch.mean])
def test_the_gradient_of_a_leaf_without_a_rule_for_what_autograd_calls(reduce):
    x = Bare(torch.ones(2, 3)).requires_grad_()
    reduce(x.values).backward()
    reduce(x.values).backward()
    expected = torch.full((2, 3), 2.0 if reduce is torch.sum else 2 / 6)
    torch.testing.assert_close(x.grad.values, expected)
    assert x.grad.values.is_contiguous()


def test_a_cotangent_is_divided_by_a_number():
    x = Log(torch.ones(2)).requires_grad_()
    x.logs.sum().backward()
    torch.testing.assert_close(aten.div.Scalar(x.grad, 4).logs, torch.full((2,), 0.25))


@pytest.mark.parametrize("add", [torch.add, Tensor.add, Tensor.__add__, lambda x, y: x + y])
def test_a_rule_for_several_functions_is_called_with_the_one_that_it_names(add):
    Named = type("Named", (Bare,), {})
    Named.implements(torch.add, torch.sub)(
        lambda func, x, y: Named(func(x.values, y.values) if func is torch.add else x.values * 0)
    )
    assert add(Named(torch.ones(1)), Named(torch.ones(1))).values.item() == 2


# ---- cotangents that a rule materializes ---------------------------------------------------------------------


class Repeated(TensorSubclass, fallback="materialize", kind="structure"):
    """Its gradient is that of the numbers, each of which stands several times."""

    numbers: Tensor = inner(shape="n")

    @staticmethod
    def outer(numbers):
        return Outer((2 * numbers.shape[0],))

    def materialize(self):
        return self.numbers.repeat(2)


@Repeated.implements(torch.Tag.pointwise)
def _(func, x, *args):
    if isinstance(x, Repeated) and not any(isinstance(a, Tensor) for a in args):
        return Repeated(func(x.numbers, *args))
    return func(*(a.materialize() if isinstance(a, Repeated) else a for a in (x, *args)))


@Repeated.implements(torch.sum)
def _(func, x):
    return func(x.unwrap("numbers")) * 2


def test_a_rule_that_would_materialize_a_cotangent_is_derived():
    """What a cotangent stands for is not its derivative: the gradient was wrong by what ``sum`` repeats."""
    numbers = torch.tensor([1.0, 2.0], requires_grad=True)
    x = Repeated(numbers)
    cotangent = torch.autograd.grad(x.unwrap("numbers").sum(), x)[0]
    x.sigmoid().backward(cotangent)
    held = numbers.detach().sigmoid()
    torch.testing.assert_close(numbers.grad, held * (1 - held))
    numbers.grad = None
    x.sigmoid().sum().backward()  # reads the inner tensor of what a rule made: the rule's derivative
    expected = torch.tensor([1.0, 2.0], requires_grad=True)
    expected.repeat(2).sigmoid().sum().backward()
    torch.testing.assert_close(numbers.grad, expected.grad)


def test_a_gradient_is_not_materialized():
    x = Repeated(torch.ones(2)).requires_grad_()
    x.unwrap("numbers").sum().backward()
    with pytest.raises(
        DispatchError, match="which does not represent a plain tensor; read its inner tensors instead"
    ):
        x.grad.materialize()
    assert x.grad.numbers.tolist() == [1, 1] and x.materialize().tolist() == [1, 1, 1, 1]


# ---- cotangents of a class with a rule for + -----------------------------------------------------------------


def logs_with(kind):
    """A class of logarithms, whose sum is ``logaddexp``, by a rule of a kind."""

    class Logs(TensorSubclass, fallback="views"):
        log: Tensor = inner()

    def add(func, x, y, alpha=1):
        return Logs(torch.logaddexp(x.log, y.log))

    def of_family(func, x, y):
        return Logs(torch.logaddexp(x.log, y.log)) if func is torch.add else NotImplemented

    def above(func, x, y, *, alpha=1):
        return Logs(torch.logaddexp(x.unwrap("log"), y.unwrap("log")))

    rules = {
        "op": (torch.ops.aten.add.Tensor, add),
        "family": (subclasses.arithmetic, of_family),
        "tag": (torch.Tag.pointwise, add),
        "function": (torch.add, above),
    }
    if kind in rules:
        Logs.implements(rules[kind][0])(rules[kind][1])
    return Logs


READS = {
    "twice": lambda x: x.unwrap("log").sum() + 2 * x.unwrap("log").sum(),
    "of a view": lambda x: x.view(2).unwrap("log").sum() + 2 * x.unwrap("log").sum(),
    "of two views": lambda x: x.view(2).unwrap("log").sum() + 2 * x.view(1, 2).unwrap("log").sum(),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("door", [lambda f: f, lambda f: desugar.compile(f, backend="eager", fullgraph=True)])
@pytest.mark.parametrize("kind", ["none", "op", "family", "tag", "function"])
@pytest.mark.parametrize("name", READS)
def test_cotangents_are_added_whatever_the_rule_of_addition_says(name, kind, door):
    h = torch.tensor([0.5, 1.0], requires_grad=True)
    read = door(READS[name])
    (gradient,) = torch.autograd.grad(read(logs_with(kind)(h)), h)
    assert gradient.tolist() == [3, 3]


@pytest.mark.parametrize("kind", ["none", "op", "family", "tag", "function"])
def test_gradients_accumulate_whatever_the_rule_of_addition_says(kind):
    x = logs_with(kind)(torch.zeros(2)).requires_grad_()
    for _ in range(2):
        x.unwrap("log").sum().backward()
    assert x.grad.log.tolist() == [2, 2]


def test_a_constructor_that_normalizes_leaves_gradients_alone():
    class Angle(TensorSubclass, fallback="views"):
        raw: Tensor = inner()

        def __new__(cls, raw):
            return super().__new__(cls, torch.remainder(raw, 6.0))

    @Angle.implements(subclasses.arithmetic)
    def rule(func, x, y):
        return Angle(func(*(t.raw if isinstance(t, Angle) else t for t in (x, y))))

    for call in (lambda x: 2 * x, lambda x: -x, lambda x: x + x, lambda x: x / 2, lambda x: x * 1 + x * 2):
        start = torch.tensor([0.5, 1.0], requires_grad=True)
        (got,) = torch.autograd.grad((-call(Angle(start)).unwrap("raw")).sum(), start)
        (expected,) = torch.autograd.grad((-call(start)).sum(), start)
        assert torch.equal(got, expected)


def test_a_rule_multiplies_a_cotangent_by_a_value():
    """The derivative of a product does, and the author's rule answers for it."""

    class Length(TensorSubclass):
        number: Tensor = inner()

    @Length.implements(subclasses.arithmetic)
    def rule(func, x, y):
        return Length(func(*(t.number if isinstance(t, Length) else t for t in (x, y))))

    start = torch.tensor([2.0, 3.0], requires_grad=True)
    x = Length(start)
    (gradient,) = torch.autograd.grad((x * x * x + x).unwrap("number").sum(), start)
    assert gradient.tolist() == [13, 28]
