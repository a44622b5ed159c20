"""Leaves taken apart into plain tensors and built again."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from desugar.ir.values import (
    Constant,
    Flat,
    Plain,
    Same,
    Slot,
    Wrapper,
    describe,
    is_wrapper,
    paths_of,
    requires_grad,
    slots_of,
    unwrap_value,
    wrap_value,
)
from tests.desugar.classes import (
    EVERY,
    Int8Like,
    Labeled,
    Nested,
    Pair,
    TwoTensor,
    make,
    metadata,
    plain_parts,
)

# ---- taking apart --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", EVERY)
def test_round_trip(cls):
    x, flat = make(cls, 4, 6), Flat()
    value = unwrap_value(x, flat)
    again = wrap_value(value, flat.items)
    assert metadata(again) == metadata(x)
    assert (again.size(), again.stride(), again.dtype) == (x.size(), x.stride(), x.dtype)
    assert all(a is b for a, b in zip(plain_parts(again), plain_parts(x), strict=True))
    assert isinstance(value, Wrapper) and value.cls is cls and value.size == (4, 6)


def test_a_plain_tensor_and_what_is_no_tensor():
    flat, x = Flat(), torch.ones(2, requires_grad=True)
    assert unwrap_value(x, flat) == Plain(0, requires_grad=True)
    assert unwrap_value("text", flat) == Constant("text")
    assert unwrap_value(None, flat) == Constant(None)
    assert flat.items == [x] or flat.items[0] is x


def test_the_same_tensor_has_one_slot_in_whatever_wrapper():
    a, b, flat = torch.ones(2), torch.ones(2), Flat()
    values = [unwrap_value(leaf, flat) for leaf in (Pair(a, b), TwoTensor(b, a), a)]
    assert [list(slots_of(value)) for value in values] == [[0, 1], [1, 0], [0]]
    assert len(flat.items) == 2 and flat.items[0] is a and flat.items[1] is b
    assert flat.duplicate(a) == 2


def test_absent_inner_tensors_and_metadata_stand_in_the_value():
    value = unwrap_value(Labeled(torch.ones(2), label="x", count=5), Flat())
    assert isinstance(value, Wrapper)
    assert [name for name, _ in value.inner] == ["data_"]
    assert value.dynamics == (("count", 5),)
    assert value.context.statics == ("x",)
    assert wrap_value(value, [torch.ones(2)]).extra is None


def test_nested_paths():
    value = unwrap_value(make(Nested, 2), Flat())
    assert list(paths_of(value)) == [(0, ("pair", "a")), (1, ("pair", "b")), (2, ("flat",))]
    assert list(paths_of(Constant(3))) == [] and list(slots_of(Same("input", 0))) == []


def test_symbolic_ints_share_a_slot_by_expression():
    env, flat = ShapeEnv(), Flat()
    n = env.create_unbacked_symint()
    assert flat.integer(7) == 7
    assert flat.integer(n) == Slot(0) and flat.integer(n) == Slot(0)
    assert flat.integer(n + 1) == Slot(1)
    assert flat.integer(n - n) == 0
    assert unwrap_value(n, flat) == Constant(None, 0)


def test_is_wrapper_and_requires_grad():
    assert is_wrapper(make(Pair, 2)) and not is_wrapper(torch.ones(2)) and not is_wrapper("x")
    assert requires_grad(unwrap_value(make(Pair, 2, grad=True), Flat()))
    assert not requires_grad(Constant(1)) and not requires_grad(Same("input", 0))


def test_what_does_not_stand_on_its_own_is_not_built():
    with pytest.raises(TypeError, match="refers to no other leaf"):
        wrap_value(Same("input", 0), [])


# ---- as text -------------------------------------------------------------------------------------------------


def test_describe():
    flat = Flat()
    text = describe(unwrap_value(make(Int8Like, 2, 3, grad=True), flat))
    assert text.splitlines()[0] == "Int8Like size=(2, 3) torch.float32 (requires grad)"
    assert "  .qdata: plain tensor #0" in text and "  .scale: plain tensor #1" in text
    assert ".count: int (3)" in describe(unwrap_value(make(Labeled, 2), flat))
    assert describe(Same("input", 2)) == "the same object as input 2"
    assert describe(Constant(None, 4)) == "int #4" and describe(Constant("a")) == "'a'"
