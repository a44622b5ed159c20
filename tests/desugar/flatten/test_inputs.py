"""Arguments and captured tensors as flat inputs."""

from __future__ import annotations

import pytest
import torch
from torch import SymInt, nn

import desugar
from desugar.flatten.fakes import Fakes
from desugar.flatten.inputs import Inputs, is_traced
from desugar.flatten.origins import Origin
from desugar.ir.values import Constant, Plain, Same, Slot, Wrapper
from tests.desugar.classes import EVERY, Halves, Labeled, Nested, Pair, TwoTensor, make


def inputs_of(*leaves, is_dynamic=False):
    inputs = Inputs(Fakes(), is_dynamic)
    inputs.add_arguments(list(leaves))
    return inputs


# ---- arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", EVERY)
def test_every_slot_has_a_fake_and_an_origin(cls):
    inputs = inputs_of(make(cls, 2, 6), torch.ones(3), "text")
    assert len(inputs.primals()) == len(inputs.flat.items) == len(inputs.origins)
    for real, fake, slot in zip(inputs.flat.items, inputs.primals(), sorted(inputs.origins), strict=True):
        assert fake.size() == real.size() and fake.dtype == real.dtype
        assert inputs.origins[slot].leaf in (0, 1)
    assert inputs.values[-1] == Constant("text") and inputs.num_arguments == 3


def test_paths_lead_to_the_inner_tensors():
    inputs = inputs_of(make(Nested, 2))
    assert [inputs.origins[slot].path for slot in range(3)] == [("pair", "a"), ("pair", "b"), ("flat",)]


def test_one_object_is_one_leaf_and_one_tensor_one_slot():
    x, a = make(Pair, 2), torch.ones(2)
    inputs = inputs_of(x, x, a, TwoTensor(a, a))
    assert inputs.values[1] == Same("input", 0)
    assert inputs.values[2] == Plain(2)
    assert isinstance(inputs.values[3], Wrapper)
    assert inputs.values[3].inner == (("a", Plain(2)), ("b", Plain(2)))
    assert len(inputs.flat.items) == 3


# ---- symbols -------------------------------------------------------------------------------------------------


def test_every_symbol_has_a_slot_of_its_own():
    inputs = inputs_of(make(TwoTensor, 4, 3), is_dynamic=True)
    assert {Origin(0, ("a",), "size", 0), Origin(0, (), "size", 0)} <= {*inputs.origins.values()}
    (value,) = inputs.values
    assert isinstance(value, Wrapper) and all(isinstance(extent, Slot) for extent in value.size)
    assert all(isinstance(inputs.fake_items[s], SymInt) for s, o in inputs.origins.items() if o.is_symbol)


def test_a_declared_class_needs_no_symbol_for_its_outer_size():
    origins = [*inputs_of(make(Pair, 4, 3), is_dynamic=True).origins.values()]
    assert Origin(0, ("a",), "size", 0) in origins and Origin(0, (), "size", 0) not in origins
    origins = [*inputs_of(make(Halves, 4, 6), is_dynamic=True).origins.values()]
    assert Origin(0, (), "size", 0) in origins


def test_dynamic_ints():
    x = Labeled(torch.ones(2), count=5)
    (value,) = inputs_of(x).values
    assert isinstance(value, Wrapper) and value.dynamics == (("count", 5),)
    inputs = inputs_of(x, is_dynamic=True)
    (value,) = inputs.values
    assert isinstance(value, Wrapper)
    (place,) = [extent for _, extent in value.dynamics]
    assert isinstance(place, Slot) and inputs.origins[place.index] == Origin(0, ("count",), "")


# ---- tensors from outside ------------------------------------------------------------------------------------


def test_tensors_that_the_function_reaches_are_arguments_of_its_graph():
    w, module = torch.ones(3), nn.Linear(3, 3)
    program = desugar.trace(lambda x: module(x * w), make(Pair, 2, 3))
    assert len(program.inputs) == 1 + 3
    assert sorted(v.requires_grad for v in program.inputs) == [False, False, True, True]


def test_a_wrapper_that_the_function_reaches_is_taken_apart():
    w = make(Pair, 3)
    program = desugar.trace(lambda x: x * w, torch.ones(3))
    assert [type(v) for v in program.inputs] == [Plain, Wrapper]
    assert len(program.forward.graph.find_nodes(op="placeholder")) == 3


def test_is_traced():
    assert not is_traced(torch.ones(2)) and not is_traced(make(Nested, 2))
    with Fakes().mode:
        assert is_traced(torch.ones(2)) and is_traced(Pair(torch.ones(2), torch.ones(2)))
