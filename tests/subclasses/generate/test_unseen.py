"""Attributes that are no fields: kept as on any tensor, with a warning where a compiled rule would miss them."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn

import desugar
from subclasses import TensorSubclass, inner, static
from tests.subclasses.subjects import MODES, declare

aten = torch.ops.aten


Marked = declare(name="Marked", __module__=__name__, count=0, keywords={"fallback": "map"})


def fresh(base=TensorSubclass, **body):
    """A class of its own, which materializes."""

    def materialize(self):
        return self.held * getattr(self, "offset", 1)

    body = {"materialize": materialize} | body
    return declare(
        base,
        name="Box",
        held=inner(),
        known=static(default=0),
        width=1,
        keywords={"fallback": "materialize"},
        **body,
    )


@contextlib.contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("name", ["note", "is_hf_initialized", "_no_weight_decay", "main_grad", "count"])
def test_marks_are_kept_without_a_word(name):
    x = Marked(torch.ones(2))
    with no_warning():
        setattr(x, name, True)
        parameter = nn.Parameter(Marked(torch.ones(2)))
        setattr(parameter, name, True)
        parameter.grad = Marked(torch.ones(2))
    for y in (x, parameter, copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert getattr(y, name) is True
    assert not getattr(x * 2, name, False)


@pytest.mark.parametrize("mode", ["stock", "desugar"])
def test_a_compiled_function_sees_what_it_reads_itself(mode):
    def fn(x):
        y = x * x.note
        y.note = 3
        return y

    x = Marked(torch.ones(2))
    compiled = MODES[mode](fn)
    for note in (5, 7):
        x.note = note
        out = compiled(x)
        assert (out.held.tolist(), out.note) == ([note, note], 3)


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
    with no_warning():
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


def test_fields_and_attributes_of_tensor_are_no_matter():
    Box = fresh()
    Box.implements(aten.cos.default)(lambda func, x: x.held * x.known if x.grad is None else x)
    x = Box(torch.ones(2))
    with no_warning():
        x.grad = None
        x.requires_grad = True
        x.held = torch.zeros(2)
    with pytest.raises(AttributeError, match=r"Box\.known is metadata and constant"):
        x.known = 3


def _gained(x):
    return x.held * x.gain


MIXIN = {
    "scaled": property(lambda self: self.held * self.gain),
    "by_name": lambda self: self.held * self.__dict__.get("gain", 1),
    "gain": 1,
}
INDIRECTLY = {
    "a property": lambda self: self.scaled,
    "a method": lambda self: self.by_name(),
    "a function of the module": _gained,
    "a function that calls one": lambda self: _gained(self) * 2,
    "an underscore": lambda self: self.held * self._gain,
}


@pytest.mark.parametrize("how", INDIRECTLY)
def test_an_attribute_that_materialize_reads_by_what_it_calls(how):
    mixin = type("Mixin", (), MIXIN)
    x = fresh((mixin, TensorSubclass), materialize=INDIRECTLY[how], _gain=1)(torch.ones(2))
    name = "_gain" if how == "an underscore" else "gain"
    with pytest.warns(UserWarning, match=rf"Box\.{name} is no field, and .* reads an attribute of this name"):
        setattr(x, name, 3)
    with no_warning():
        x.other = x._other = 3


def test_what_a_method_reads_that_a_compiled_function_calls():
    def scaled(self):
        return self.held * self.gain

    box = declare(
        name="Box",
        held=inner(),
        gain=1,
        scaled=scaled,
        __repr__=lambda self: f"Box of {self.label}",
        keywords={"fallback": "map"},
    )
    x = box(torch.ones(2))
    with pytest.warns(UserWarning, match=r"Box\.gain is no field, and .*scaled .* reads"):
        x.gain = 5
    found = desugar.compile(lambda x: x.scaled(), backend="eager")(x)
    assert found.tolist() == [1, 1]  # the reason of the warning
    with no_warning():
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
    x = fresh(cache=inner(), materialize=lambda self: self.held * self.cache)(
        torch.ones(2), torch.full((2,), 3.0)
    )
    for run in (torch.cos, torch.compile(torch.cos, backend="aot_eager")):
        assert torch.equal(run(x), torch.full((2,), 3.0).cos())
