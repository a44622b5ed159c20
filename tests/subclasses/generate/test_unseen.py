"""Attributes that are no fields: kept as on any tensor, with a warning where a compiled rule would miss them."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn

import desugar
from subclasses import TensorSubclass, inner, static

aten = torch.ops.aten


class Marked(TensorSubclass, fallback="map"):
    held: Tensor = inner()
    count = 0


def fresh():
    class Box(TensorSubclass, fallback="materialize"):
        held: Tensor = inner()
        known: int = static(default=0)
        width = 1

        def materialize(self):
            return self.held * getattr(self, "offset", 1)

    return Box


@pytest.mark.parametrize("name", ["note", "is_hf_initialized", "_no_weight_decay", "main_grad", "count"])
def test_marks_are_kept_without_a_word(name):
    x = Marked(torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        setattr(x, name, True)
        parameter = nn.Parameter(Marked(torch.ones(2)))
        setattr(parameter, name, True)
        parameter.grad = Marked(torch.ones(2))
    for y in (x, parameter, copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert getattr(y, name) is True
    assert not getattr(x * 2, name, False)


@pytest.mark.parametrize(
    "compiler",
    [
        lambda fn: torch.compile(fn, backend="aot_eager", fullgraph=True),
        lambda fn: desugar.compile(fn, backend="eager"),
    ],
    ids=["aot_eager", "desugar"],
)
def test_a_compiled_function_sees_what_it_reads_itself(compiler):
    def fn(x):
        y = x * x.note
        y.note = 3
        return y

    x = Marked(torch.ones(2))
    compiled = compiler(fn)
    for note in (5, 7):
        x.note = note
        out = compiled(x)
        assert (out.held.tolist(), out.note) == ([note, note], 3)
    torch.compiler.reset()


RULES = {
    "dot": lambda func, x: x.held + x.note,
    "getattr": lambda func, x: x.held + getattr(x, "note", 0),
    "nested": lambda func, x: next(y.note for y in (x,)),
    "partial": functools.partial(lambda extra, func, x: x.note, None),
}


@pytest.mark.parametrize(
    "key", [aten.cos.default, torch.cos, torch.Tag.pointwise], ids=["op", "function", "tag"]
)
@pytest.mark.parametrize("rule", RULES)
def test_an_attribute_that_a_rule_reads_warns_once(key, rule):
    Box = fresh()
    Box(torch.ones(2)).note = 1  # no rule reads it yet
    Box.implements(key)(RULES[rule])
    x = Box(torch.ones(2))
    with pytest.warns(
        UserWarning, match=r"Box\.note is no field.*static\(default=\.\.\.\).*Box\(\.\.\., note="
    ) as seen:
        x.note = 1
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x.note = 2
        x.other = 3
        Box(torch.ones(2)).note = 3
    assert x.note == 2


@pytest.mark.parametrize("name", ["offset", "width"])
def test_methods_and_constants_of_the_class(name):
    Box = fresh()
    Box.implements(aten.cos.default)(lambda func, x: x.held * x.width)
    with pytest.warns(UserWarning, match=rf"Box\.{name} is no field"):
        setattr(Box(torch.ones(2)), name, 5)


def test_what_is_warned_of_is_lost_in_compiled_code():
    """The reason of the warning: eager mode and a compiled function differ."""
    Box = fresh()
    x = Box(torch.ones(2))
    with pytest.warns(UserWarning, match=r"materialize .* reads"):
        x.offset = 5
    assert (x + 0).tolist() == [5, 5]
    assert torch.compile(lambda x: x + 0, backend="aot_eager")(x).tolist() == [1, 1]
    torch.compiler.reset()


def test_fields_and_attributes_of_tensor_are_no_matter():
    Box = fresh()
    Box.implements(aten.cos.default)(lambda func, x: x.held * x.known if x.grad is None else x)
    x = Box(torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x.grad = None
        x.requires_grad = True
        x.held = torch.zeros(2)
    with pytest.raises(AttributeError, match=r"Box\.known is metadata and constant"):
        x.known = 3


def _gained(x):
    return x.held * x.gain


class Mixin:
    gain = 1

    @property
    def scaled(self):
        return self.held * self.gain

    def by_name(self):
        return self.held * self.__dict__.get("gain", 1)


INDIRECTLY = {
    "a property": lambda self: self.scaled,
    "a method": lambda self: self.by_name(),
    "a function of the module": _gained,
    "a function that calls one": lambda self: _gained(self) * 2,
    "an underscore": lambda self: self.held * self._gain,
}


@pytest.mark.parametrize("how", INDIRECTLY)
def test_an_attribute_that_materialize_reads_by_what_it_calls(how):
    class Box(Mixin, TensorSubclass, fallback="materialize"):
        held: Tensor = inner()
        _gain = 1
        materialize = INDIRECTLY[how]

    name = "_gain" if how == "an underscore" else "gain"
    x = Box(torch.ones(2))
    with pytest.warns(UserWarning, match=rf"Box\.{name} is no field, and .* reads an attribute of this name"):
        setattr(x, name, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x.other = x._other = 3


def test_what_a_method_reads_that_a_compiled_function_calls():
    class Box(TensorSubclass, fallback="map"):
        held: Tensor = inner()
        gain = 1

        def scaled(self):
            return self.held * self.gain

        def __repr__(self):
            return f"Box of {self.label}"

    x = Box(torch.ones(2))
    with pytest.warns(UserWarning, match=r"Box\.gain is no field, and .*scaled .* reads"):
        x.gain = 5
    assert desugar.compile(lambda x: x.scaled(), backend="eager")(x).tolist() == [
        1,
        1,
    ]  # the reason of the warning
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x.label = "x"


@pytest.mark.parametrize(
    ("value", "mend"),
    [
        (
            torch.ones(2),
            "A tensor is no metadata: compute it each time from the fields, or declare `cache: Tensor =",
        ),
        (
            [torch.ones(2)],
            "It holds a tensor, which is no metadata: compute it each time from the fields, or declare",
        ),
        ({"a": (torch.ones(2),)}, "It holds a tensor"),
        (
            3.0,
            "Declare `cache` with static(default=...) and pass it to the constructor, Cached(..., cache=...)",
        ),
        ([1], "Declare `cache` with static("),
        (None, "Declare `cache` with static("),
    ],
)
def test_what_is_advised_for_a_tensor_is_no_metadata(value, mend):
    class Cached(TensorSubclass, fallback="materialize"):
        held: Tensor = inner()

        def materialize(self):
            self.cache = value
            return self.held * 2 if self.cache is None else self.held

    with pytest.warns(UserWarning, match=r"Cached\.cache is no field") as caught:
        Cached(torch.ones(2)).materialize()
    assert mend in str(caught[0].message)
    assert ("static(" in str(caught[0].message)) == ("static(" in mend)


def test_the_inner_tensor_that_a_cached_tensor_becomes():
    class Cached(TensorSubclass, fallback="materialize"):
        held: Tensor = inner()
        cache: Tensor = inner()

        def materialize(self):
            return self.held * self.cache

    x = Cached(torch.ones(2), torch.full((2,), 3.0))
    for run in (torch.cos, torch.compile(torch.cos, backend="aot_eager")):
        assert torch.equal(run(x), torch.full((2,), 3.0).cos())
