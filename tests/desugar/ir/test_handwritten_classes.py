"""Desugar accepts a class written by hand if it can prove that the methods of the class do very little."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from desugar.ir.values import Flat, unwrap_value
from subclasses.adoption.flatten_purity import flattens_to_constants
from tests.desugar.classes import Halves, Single, Tagged, TwoTensor, make
from tests.desugar.judge import by_pass, judge
from tests.tables import giving


class Counted(Single):
    """A further attribute."""

    def __init__(self, a):
        super().__init__(a)
        self.seen = 1


class Asking(Single):
    """A class whose `__tensor_flatten__` branches on its state."""

    def __tensor_flatten__(self):
        return ["a"] if self.a is not None else [], None


class Reading(Single):
    """Reads a global."""

    def __tensor_flatten__(self):
        return NAMES, None


class Policied(Single):
    """A class whose own dispatch computes its size."""

    options: ClassVar[dict[str, Any]] = {"dispatch_sizes_strides_policy": "sizes"}


NAMES = ["a"]


def rebuilding(build):
    """The namespace of a class whose `__tensor_unflatten__` calls `build` with the inner tensor."""
    return {
        "__tensor_unflatten__": classmethod(lambda cls, inner_tensors, *_: build(cls, inner_tensors["a"]))
    }


Other = type("Other", (Single,), rebuilding(lambda cls, a: Single(a)))
# Further members of a class; `Counted` has a further attribute, and `Other` returns an instance of another class.
MORE = {
    "a slot that is in no dictionary": {"__slots__": ("hidden",)},
    "another storage offset": {"options": {"storage_offset": 3}},
    "a dispatch key of its own": {
        "options": {"_extra_dispatch_keys": torch._C.DispatchKeySet(torch._C.DispatchKey.Negative)}
    },
    "a copy of its inner tensor": rebuilding(lambda cls, a: cls(a.clone())),
}


def is_plainly_built(x):
    return unwrap_value(x, Flat()).plainly_built


# Metadata in the dictionary, and classes with further behaviour.
ODD = [make(Tagged, 2, 3), *(cls(torch.ones(2, 3)) for cls in (Counted, Policied, Other))]
ODD += [type(name, (Single,), more)(torch.ones(2, 3)) for name, more in MORE.items()]
FLATTENING = {
    **dict.fromkeys((Single, Counted, TwoTensor, Halves), True),
    **dict.fromkeys((Asking, Reading, Tagged), False),
    type("Builtin", (Single,), {"__tensor_flatten__": len}): False,  # no Python function
}
test_what_is_proved = giving(
    {
        **{f"{type(x).__name__} is not plainly built": (lambda x=x: is_plainly_built(x), False) for x in ODD},
        **{
            f"{cls.__name__} flattens to constants": (lambda cls=cls: flattens_to_constants(cls), constant)
            for cls, constant in FLATTENING.items()
        },
    }
)


def test_a_size_that_the_class_answers_is_its_answer_for_results():
    double = lambda x: x * 2  # noqa: E731
    for f in (double, by_pass(double)):
        y = f(Policied(torch.ones(2, 3)))
        y.a = torch.ones(5, 3)
        assert y.shape == (5, 3)


def test_what_does_nothing_is_seen_to():
    for x in (Single(torch.ones(2, 3)), Single(torch.ones(2, 3).t()), make(Halves, 2, 6)):
        before = dict(x.__dict__)
        assert is_plainly_built(x)
        assert x.__dict__ == before, "nothing is added to the tensor"


@pytest.mark.parametrize("cls", [Single, Counted, Asking, Reading])
@pytest.mark.parametrize("grad", [False, True])
def test_results_are_eagers(cls, grad):
    (program,) = judge(
        lambda x: (x * 2).sin(), lambda: (cls(torch.randn(2, 3)).requires_grad_(grad),)
    ).programs
    assert ("__tensor_unflatten__" in program.wrapper) == (cls is Counted)
