"""Attributes that are no fields: kept as on any tensor, with a warning where one hides a constant of the class."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from subclasses import inner, static
from tests.subclasses.subjects import MODES, declare

aten = torch.ops.aten


Marked = declare(name="Marked", __module__=__name__, count=0, keywords={"fallback": "map"})


def fresh(**body):
    """A class of its own, which materializes."""
    return declare(
        name="Box",
        held=inner(),
        known=static(default=0),
        width=1,
        keywords={"fallback": "materialize"},
        materialize=lambda self: self.held * getattr(self, "offset", 1),
        **body,
    )


@pytest.mark.parametrize("name", ["note", "is_hf_initialized", "_no_weight_decay", "main_grad"])
def test_marks_are_kept_without_a_word(name):
    x = Marked(torch.ones(2))
    with warnings.catch_warnings(action="error"):
        setattr(x, name, True)
        parameter = nn.Parameter(Marked(torch.ones(2)))
        setattr(parameter, name, True)
        parameter.grad = Marked(torch.ones(2))
    for y in (x, parameter, copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert getattr(y, name) is True
    assert not getattr(x * 2, name, False)


def read_and_mark(x):
    y = x * x.note
    y.note = 3
    return y


@pytest.mark.parametrize("mode", ["stock", "desugar"])
def test_a_compiled_function_sees_what_it_reads_itself(mode):
    x = Marked(torch.ones(2))
    compiled = MODES[mode](read_and_mark)
    for note in (5, 7):
        x.note = note
        out = compiled(x)
        assert (out.held.tolist(), out.note) == ([note, note], 3)


def test_an_attribute_that_hides_a_constant_of_the_class_warns():
    """In compiled code, rules and methods read the constant: eager mode and a compiled function differ."""
    Box = fresh(offset=1)
    x = Box(torch.ones(2))
    with pytest.warns(
        UserWarning, match=r"Box\.offset is a constant.*`offset = static\(default=1\)`"
    ) as seen:
        x.offset = 5
    assert seen[0].filename == __file__
    assert (x + 0).tolist() == [5, 5]
    for door in ("stock", "desugar", "inside"):
        assert MODES[door](lambda x: x + 0)(x).tolist() == [1, 1]


def test_fields_and_attributes_of_tensor_are_no_matter():
    Box = fresh()
    Box.implements(aten.cos.default)(lambda func, x: x.held * x.known if x.grad is None else x)
    x = Box(torch.ones(2))
    with warnings.catch_warnings(action="error"):
        x.grad = None
        x.requires_grad = True
        x.held = torch.zeros(2)
    with pytest.raises(AttributeError, match=r"Box\.known is metadata and constant"):
        x.known = 3
