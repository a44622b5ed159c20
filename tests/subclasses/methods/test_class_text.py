"""The generated text of a class: the lines that it has, and the lines that it lacks."""

from __future__ import annotations

import ast
import inspect
import re

import pytest
import torch

from subclasses import TensorSubclass, inner
from subclasses.methods.attributes import StaticField
from tests.subclasses import subjects
from tests.subclasses.subjects import (
    FACTORIES,
    Int8Weight,
    Optional,
    Pair,
    Rows,
    Shadow,
    Tagged,
    assert_same,
    declare,
)
from tests.tables import giving

CLASSES = (
    Pair,
    Int8Weight,
    subjects.Scaled,
    Rows,
    Tagged,
    subjects.Nested,
    Optional,
    Shadow,
    subjects.Hostile,
)
METHODS = (
    "__new__ __tensor_flatten__ __tensor_unflatten__ __torch_dispatch__ __repr__ __metadata_guard__ __setattr__ "
    "__coerce_tangent_metadata__ __coerce_same_metadata_as_tangent__ _stable_hash_for_caching __reduce_ex__ "
    "__deepcopy__ fsdp_pre_all_gather fsdp_post_all_gather share_memory_ is_shared"
).split()


def source_of(cls: type, name: str) -> str:
    return inspect.getattr_static(getattr(cls, name), "__source__", None) or getattr(cls, name).__source__


@pytest.mark.parametrize("cls", CLASSES)
def test_every_method_shows_its_own_lines(cls):
    for name in METHODS:
        text = source_of(cls, name)
        assert text.startswith(f"def {name}(")
        assert text in cls.__source__
        assert inspect.getsource(getattr(cls, name)) == text
        assert getattr(cls, name).__qualname__ == f"{cls.__qualname__}.{name}"


@pytest.mark.parametrize("cls", CLASSES)
def test_the_text_is_straight_line(cls):
    tree = ast.parse(cls.__source__)
    looping = ast.For | ast.While | ast.ListComp | ast.GeneratorExp | ast.DictComp
    assert not [n for n in ast.walk(tree) if isinstance(n, looping)]
    assert not re.search(r"\b(getattr|hasattr|eval|exec|locals|globals)\(", cls.__source__)


UNFLATTEN = (
    "def __tensor_unflatten__(_inner_tensors, _layout, _outer_size, _outer_stride):\n"
    "    return _wrap(_layout, _inner_tensors['a'], _inner_tensors['b'])\n"
)
# The class, a method or the whole text, lines that the text has, and lines that it lacks.
TEXT = {
    "what a pair lacks": (
        Pair,
        None,
        ["a.__class__ is Tensor and b.__class__ is Tensor"],
        ["carrier", "statics", "_outer_of", "raise_wrong_dtype", "is not None and", "size(0)"],
    ),
    "names of what is always there": (
        Pair,
        "__tensor_flatten__",
        ["return ['a', 'b'], _dict[\"_layout\"]"],
        [],
    ),
    "names of what may be absent": (Optional, "__tensor_flatten__", ["_layout.present"], []),
    "a dtype that is declared, and an inner tensor that cannot require grad": (
        Int8Weight,
        None,
        ["if qdata.dtype is not int8:", "scale.requires_grad"],
        ["qdata.requires_grad"],
    ),
    "a dtype that is not declared": (Int8Weight, "__new__", [], ["scale.dtype"]),
}


@pytest.mark.parametrize("case", TEXT)
def test_the_text_says_what_is_declared_alone(case):
    cls, name, present, absent = TEXT[case]
    text = cls.__source__ if name is None else source_of(cls, name)
    assert all(words in text for words in present) and not [words for words in absent if words in text]


# ---- the methods at work -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FACTORIES)
def test_repr_is_the_call_that_makes_the_value(kind):
    x = FACTORIES[kind]()
    shown = repr(x)
    assert shown.startswith(f"{type(x).__name__}({type(x).__spec__.names[0]}=")
    assert "grad" not in shown
    if x.is_floating_point():
        assert repr(x.requires_grad_()).endswith(", requires_grad=True)")


def test_repr_evaluates_back_and_names_a_grad_fn():
    assert "grad_fn=<MulBackward0>" in repr(subjects.make_pair().requires_grad_() * 2)
    x = Tagged(torch.tensor([1.0, 2.0]), tag="t", length=3)
    assert_same(eval(repr(x), {"Tagged": Tagged, "tensor": torch.tensor}), x)


def facts(x):
    return x.shape, x.stride(), x.dtype


TURNED = Int8Weight(torch.ones(4, 3, dtype=torch.int8).t(), torch.ones(3, 1, dtype=torch.bfloat16))
TAGGED = Tagged(torch.ones(2), tag="t", mode=4)
OWN = declare(__repr__=lambda self: "mine", __metadata_guard__=lambda cls, saved, now: True)
CHILD = declare(OWN, b=inner())
LOUD = declare((type("Loud", (), {"__repr__": lambda self: "LOUD"}), TensorSubclass), a=inner())
test_what_a_value_shows = giving(
    {
        "unflattening in one call": (lambda: source_of(Pair, "__tensor_unflatten__"), UNFLATTEN),
        "carriers with dynamic ints alone": (
            lambda: [c for c in CLASSES if "carrier" in c.__source__],
            [Rows, Tagged],
        ),
        "a transposed value": (lambda: facts(TURNED), ((3, 4), (1, 3), torch.bfloat16)),
        "a computed size": (lambda: facts(Rows(torch.ones(4), count=3)), ((3, 4), (4, 1), torch.float32)),
        "metadata": (lambda: (TAGGED.tag, TAGGED.mode, TAGGED.length), ("t", 4, 0)),
        "metadata of the class": (lambda: type(vars(Tagged)["tag"]), StaticField),
        "the constructor": (
            lambda: str(inspect.signature(Int8Weight._new)),
            "(_cls, qdata, scale, zero=None, *_more, axis=0)",
        ),
        "a constructor with a dynamic int": (
            lambda: str(inspect.signature(Rows._new)),
            "(_cls, row, *_more, count)",
        ),
        "a method of the class body": (lambda: repr(OWN(torch.ones(1))), "mine"),
        "a method of a base": (lambda: repr(CHILD(torch.ones(1), torch.ones(1))), "mine"),
        "a guard of a base": (lambda: CHILD.__metadata_guard__ is OWN.__metadata_guard__, True),
        "the generated method beside it": (lambda: "def __repr__" in OWN.__source__, True),
        "a method of a mixin": (lambda: repr(LOUD(torch.ones(1))), "LOUD"),
    }
)
