"""Every error class, each with its messages: where it is, what was expected, what came, what to do instead.

A row is something that a user writes by mistake, and the words that the message has to hold: the name of what is
wrong, what was expected or found, and a way out. Errors of the pass also name a line of this file: the one that is
marked.
"""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import desugar
import subclasses
from desugar import DesugarError
from subclasses import DispatchError, SpecError, TensorSubclass, dynamic, inner, static
from subclasses.ragged import JaggedTensor
from subclasses.testing import ConformanceError, check

HERE = __file__


class Pair(TensorSubclass, fallback="map"):
    first: Tensor = inner()
    second: Tensor = inner()
    tag: str = static(default="")


class Strict(TensorSubclass):
    data_: Tensor = inner(dtype=torch.float32)


class Dense(TensorSubclass, fallback="materialize"):
    raw: Tensor = inner()

    def materialize(self):
        return self.raw * 2


def pair(grad=False):
    return Pair(torch.ones(3), torch.ones(3)).requires_grad_(grad)


# ---- SpecError: a declaration -------------------------------------------------------------------------------


def no_inner():
    class Empty(TensorSubclass):
        tag: int = static(default=0)


def unknown_size_from():
    class Sized(TensorSubclass, size_from="dta"):
        data_: Tensor = inner()


def unknown_keyword():
    class Keyed(TensorSubclass, fallbck="map"):
        data_: Tensor = inner()


def unknown_fallback():
    class Fallen(TensorSubclass, fallback="mapped"):
        data_: Tensor = inner()


def nothing_to_materialize():
    class Bare(TensorSubclass, fallback="materialize"):
        data_: Tensor = inner()


def mutable_default():
    class Listed(TensorSubclass):
        data_: Tensor = inner()
        shape_: list = static(default=[])


def tensor_default():
    class Held(TensorSubclass):
        data_: Tensor = inner()
        scale: Tensor = static(default=torch.ones(1))


def taken_name():
    class Named(TensorSubclass):
        data: Tensor = inner()


def half_optional():
    class Half(TensorSubclass):
        data_: Tensor = inner()
        zero: Tensor = inner(optional=True)


def no_annotation():
    class Bare(TensorSubclass):
        data_ = inner()


def float_dynamic():
    class Floating(TensorSubclass):
        data_: Tensor = inner()
        length: float = dynamic()


def two_rules():
    class Ruled(TensorSubclass):
        data_: Tensor = inner()

    for _ in range(2):
        Ruled.implements(torch.ops.aten.mul.Tensor)(lambda func, *args: None)


def rule_for_nothing():
    Strict.implements("mul")(lambda func, *args: None)


SPEC = [
    (no_inner, ["Empty", "no inner tensor", "inner()"]),
    (unknown_size_from, ["Sized", "'dta'", "data_"]),
    (unknown_keyword, ["Keyed", "'fallbck'", "fallback"]),
    (unknown_fallback, ["Fallen", "'mapped'", "materialize", "map", "error"]),
    (nothing_to_materialize, ["Bare", "materialize(self) -> Tensor"]),
    (mutable_default, ["Listed.shape_", "[]", "tuple"]),
    (tensor_default, ["Held.scale", "tensor", "inner()"]),
    (taken_name, ["Named.data", "choose another name"]),
    (half_optional, ["Half.zero", "Tensor | None = inner(optional=True)"]),
    (no_annotation, ["Bare.data_", "no annotation", "data_: Tensor = inner()"]),
    (float_dynamic, ["Floating.length", "non-negative int", "'float'", "static()"]),
    (two_rules, ["Ruled", "two rules", "aten.mul.Tensor", "remove one"]),
    (rule_for_nothing, ["Strict.implements", "'mul'", "torch.ops.aten.mul.Tensor"]),
    (lambda: subclasses.coverage(int), ["coverage()", "TensorSubclass", "int"]),
]

# ---- TypeError, ValueError: a construction ------------------------------------------------------------------

VALUES = [
    (lambda: Pair(torch.ones(2), 3), TypeError, ["Pair.second", "expected a Tensor", "int"]),
    (lambda: Strict(torch.ones(2, dtype=torch.int8)), ValueError, ["Strict.data_", "float32", "int8"]),
    (
        lambda: Pair(torch.ones(2), torch.ones(2, device="meta")),
        ValueError,
        ["Pair.second", "cpu", "meta", "any"],
    ),
    (
        lambda: Pair(torch.ones(2), torch.ones(2), tag=[]),
        TypeError,
        ["Pair.tag", "hashable", "list", "tuple"],
    ),
    (
        lambda: Pair(torch.ones(2), torch.ones(2), tag=torch.ones(1)),
        TypeError,
        ["Pair.tag", "static", "inner()"],
    ),
    (
        lambda: setattr(pair(), "first", torch.ones(3, requires_grad=True)),
        ValueError,
        ["Pair.first", ".detach()"],
    ),
    (lambda: desugar.compile(3), TypeError, ["function or nn.Module", "int"]),
    (lambda: desugar.compile(len, backend="quick"), ValueError, ["inductor", "eager", "callable", "'quick'"]),
    (
        lambda: desugar.compile(len, backend="eager", mode="max-autotune"),
        ValueError,
        ["mode", "inductor", "eager"],
    ),
    (lambda: subclasses.coverage(Pair).ops("ruled"), ValueError, ["'ruled'", "rule", "materialize"]),
]

# ---- DispatchError: an op -----------------------------------------------------------------------------------


def strictly():
    with subclasses.strict():
        return Dense(torch.ones(2)) + 1


DISPATCH = [
    (lambda: Strict(torch.ones(2)) * 2, ["Strict", "no rule", "aten.mul.Tensor", "@Strict.implements"]),
    (strictly, ["aten.add.Tensor", "materialize a Dense", "strict()"]),
    (lambda: Dense(torch.ones(2)).add_(1), ["aten.add_.Tensor", "writes to a Dense", "functional op"]),
    (
        lambda: pair() + Pair(torch.ones(3), torch.ones(3), tag="other"),
        ["aten.add.Tensor", "different metadata", "'other'", "@Pair.implements"],
    ),
    (lambda: torch.ones(3).add_(pair()), ["aten.add_.Tensor", "Pair", "plain tensor"]),
]

# ---- DesugarError: a function -------------------------------------------------------------------------------


def branches_on_data(x):
    return x + 1 if x.sum() > 0 else x  # here


def reads_memory(x):
    return x * x.data_ptr()  # here


def assigns_data(x):
    x.data = torch.zeros(3)  # here
    return x * 2


def reads_grad(x):
    return x * 2 if x.grad is None else x  # here


def writes_expanded(x):
    y = torch.ones(1).expand(3)
    y.add_(1)  # here
    return x + y


def resizes(x):
    x.resize_(5)  # here
    return x * 2


class Holder:
    def __init__(self, y):
        self.y = y


def returns_an_object(x):
    return Holder(x * 2)  # here


def changes_a_container(x, held=None):
    held = [x] if held is None else held
    return x * 2, held


def grows(held):
    doubled = twice(held[0])
    held.append(twice(doubled))  # here
    return held[0] + 1


def twice(x):
    return x * 2


def swaps(held):
    for name in sorted(held):
        held[name] = held[name] + 1  # here
    return held["x"]


def runs_backward(x):
    y = (x * 2).sum()
    y.backward()  # here
    return y


COUNTS = []


def counts_its_calls(x):
    COUNTS.append(None)
    return [x * 2] * len(COUNTS)  # here


def takes_nested(x):
    return x * 2


class Keeps(nn.Module):
    def forward(self, x):
        self.last = x * 2
        return self.last + 1


def twice_random(x):
    return F.dropout(x, 0.5) ** 3


GRAD = torch.ones(3, requires_grad=True)
REFUSED = [
    (branches_on_data, (torch.ones(3),), ["data of a tensor", "torch.where"]),
    (reads_memory, (torch.ones(3),), ["data_ptr", "memory", "eager mode"]),
    (assigns_data, (torch.ones(3),), [".data", "copy_"]),
    (reads_grad, (torch.ones(3),), [".grad", "argument"]),
    (writes_expanded, (torch.ones(3),), ["add_ writes to an", "(3,)", "clone()"]),
    (resizes, (torch.ones(3),), ["size", "new tensor"]),
    (returns_an_object, (torch.ones(3),), ["Holder", "tuples, lists, dicts"]),
    (grows, ([torch.ones(3)],), ["changes a container", "copy"]),
    (swaps, ({"x": torch.ones(3)},), ["changes a container", "copy"]),
    (runs_backward, (GRAD,), ["backward()", "return the loss"]),
    (counts_its_calls, (torch.ones(3),), ["another structure", "second time", "arguments only"]),
    (takes_nested, (torch.ones(3).to_sparse(),), ["expected strided", "sparse", "to_dense()"]),
]


def explain(error):
    """A message that failed the review, in full."""
    return f"{type(error).__name__}: {error}"


def assert_says(error, words):
    text = " ".join(str(error).split())
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} is not in the message\n{explain(error)}"


def name_of(row):
    return row.__name__ if callable(row) else None


@pytest.mark.parametrize(("declare", "words"), SPEC, ids=name_of)
def test_declarations(declare, words):
    with pytest.raises(SpecError) as caught:
        declare()
    assert isinstance(caught.value, TypeError)
    assert_says(caught.value, words)


@pytest.mark.parametrize(("make", "kind", "words"), VALUES)
def test_constructions_and_options(make, kind, words):
    with pytest.raises(kind) as caught:
        make()
    assert_says(caught.value, words)


@pytest.mark.parametrize(("run", "words"), DISPATCH)
def test_ops(run, words):
    with pytest.raises(DispatchError) as caught:
        run()
    assert isinstance(caught.value, NotImplementedError)
    assert_says(caught.value, words)


@pytest.mark.parametrize("compiler", [desugar.trace, desugar.explain], ids=["trace", "explain"])
@pytest.mark.parametrize(("fn", "args", "words"), REFUSED, ids=name_of)
def test_functions(compiler, fn, args, words):
    COUNTS.clear()
    with pytest.raises(DesugarError) as caught:
        compiler(fn, *args)
    error = caught.value
    assert_says(error, words)
    assert error.where is not None and error.where.startswith(f"{HERE}:"), explain(error)
    if "# here" in inspect.getsource(fn):
        assert "# here" in error.where, explain(error)


def test_what_a_module_keeps():
    compiled = desugar.compile(Keeps(), backend="eager")
    with pytest.raises(DesugarError) as caught:
        desugar.trace(Keeps(), torch.ones(3))
    assert_says(caught.value, ["Keeps.last", "tensor that it computes", "buffer", "return it"])
    assert compiled.programs == []


def test_a_backward_that_cannot_be_repeated():
    x = torch.ones(3, requires_grad=True)
    y = desugar.compile(twice_random, backend="eager")(x).sum()
    with pytest.raises(DesugarError) as caught:
        torch.autograd.grad(y, x, create_graph=True)
    assert_says(caught.value, ["other random numbers", "dropout", "eager mode"])


def test_rows_of_different_lengths_are_both_named():
    one = JaggedTensor.from_tensors([torch.ones(2), torch.ones(3)])
    other = JaggedTensor.from_tensors([torch.ones(3), torch.ones(2)])
    with pytest.raises((RuntimeError, ValueError)) as caught:
        one + other
    assert_says(caught.value, ["[2, 3]", "[3, 2]"])


def test_the_kit_says_which_promise_how_and_what_to_do():
    class Odd(TensorSubclass, fallback="materialize"):
        raw: Tensor = inner()

        def materialize(self):
            return self.raw * 2

    @Odd.implements(torch.ops.aten.mul.Tensor)
    def _(func, x, y):
        return x.materialize() + 1  # wrong

    with pytest.raises(ConformanceError) as caught:
        check(lambda: Odd(torch.randn(3, 4)))
    assert_says(caught.value, ["Odd keeps", "breaks", "values", "broken:", "mend:"])


def test_an_error_of_the_users_own_stays_what_it_is():
    def fn(x):
        return x @ torch.ones(7)  # the user's mistake

    with pytest.raises(RuntimeError) as caught:
        desugar.trace(fn, torch.ones(3))
    assert not isinstance(caught.value, DesugarError)
    frames = [entry for entry in caught.traceback if str(entry.path) == HERE]
    assert "the user's mistake" in str(frames[-1].statement)
