"""What can be proved of a class written by hand: that its methods do very little."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from desugar.ir.values import Flat, unwrap_value
from subclasses.adoption.flatten_purity import flattens_to_constants
from tests.desugar.classes import Halves, Single, Tagged, TwoTensor, make
from tests.desugar.judge import by_pass, judge
from tests.doors import by_stock


class Counted(Single):
    """A further attribute."""

    def __init__(self, a):
        super().__init__(a)
        self.seen = 1


class Other(Single):
    """Gives an instance of another class."""

    @classmethod
    def __tensor_unflatten__(cls, inner_tensors, context, outer_size, outer_stride):
        return Single(inner_tensors["a"])


class Asking(Single):
    """Asks itself what to give."""

    def __tensor_flatten__(self):
        return ["a"] if self.a is not None else [], None


class Reading(Single):
    """Reads a global."""

    def __tensor_flatten__(self):
        return NAMES, None


class Policied(Single):
    """Its size is what its own dispatch answers."""

    options: ClassVar[dict[str, Any]] = {"dispatch_sizes_strides_policy": "sizes"}


def copying(cls, inner_tensors, context, outer_size, outer_stride):
    return cls(inner_tensors["a"].clone())


NEGATIVE = torch._C.DispatchKeySet(torch._C.DispatchKey.Negative)
NAMES = ["a"]
# What else a class has; `Counted` has a further attribute, and `Other` gives an instance of another class.
MORE = {
    "a slot that is in no dictionary": {"__slots__": ("hidden",)},
    "another storage offset": {"options": {"storage_offset": 3}},
    "a dispatch key of its own": {"options": {"_extra_dispatch_keys": NEGATIVE}},
    "a copy of its inner tensor": {"__tensor_unflatten__": classmethod(copying)},
}


def is_plainly_built(x):
    return unwrap_value(x, Flat()).plainly_built


def test_what_does_nothing_is_seen_to():
    assert is_plainly_built(Single(torch.ones(2, 3)))
    assert is_plainly_built(Single(torch.ones(2, 3).t()))
    assert is_plainly_built(make(Halves, 2, 6))


@pytest.mark.parametrize(
    "cls", [Counted, Policied, Other, *(type(name, (Single,), members) for name, members in MORE.items())]
)
def test_what_does_more_is_seen_to(cls):
    assert not is_plainly_built(cls(torch.ones(2, 3)))


def test_a_size_that_the_class_answers_is_its_answer_for_results():
    double = lambda x: x * 2  # noqa: E731
    for f in (double, by_pass(double)):
        y = f(Policied(torch.ones(2, 3)))
        y.a = torch.ones(5, 3)
        assert y.shape == (5, 3)


def test_metadata_in_the_dictionary():
    assert not is_plainly_built(make(Tagged, 2, 3))


def test_nothing_is_added_to_the_tensor_that_is_looked_at():
    x = Single(torch.ones(2))
    before = dict(x.__dict__)
    is_plainly_built(x)
    assert x.__dict__ == before


@pytest.mark.parametrize(
    ("cls", "constant"),
    [
        (Single, True),
        (Counted, True),
        (TwoTensor, True),
        (Halves, True),
        (Asking, False),
        (Reading, False),
        (Tagged, False),
    ],
)
def test_flattening(cls, constant):
    assert flattens_to_constants(cls) == constant


def test_a_method_that_is_no_python_function():
    class Builtin(Single):
        __tensor_flatten__ = len  # type: ignore[assignment]

    assert not flattens_to_constants(Builtin)


@pytest.mark.parametrize("cls", [Single, Counted, Asking, Reading])
@pytest.mark.parametrize("grad", [False, True])
def test_results_are_eagers(cls, grad):
    compiled = judge(lambda x: (x * 2).sin(), lambda: (cls(torch.randn(2, 3)).requires_grad_(grad),))
    (program,) = compiled.programs
    own = "__tensor_unflatten__" in program.wrapper
    assert own == (cls is Counted)


def test_a_class_that_gives_another_fares_as_under_stock():
    def outcome(door):
        torch.compiler.reset()
        try:
            return type(door(lambda x: x * 2)(Other(torch.ones(2))))
        except AssertionError as error:
            return str(error)

    assert outcome(by_pass) == outcome(by_stock)
