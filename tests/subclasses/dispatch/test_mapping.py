"""The text of mapped ops: one op, one straight line for each inner tensor."""

from __future__ import annotations

import gc
import linecache
import weakref

import pytest
import torch
from torch import Tensor

from subclasses import DispatchError, TensorSubclass, inner
from subclasses._torch import all_aten_ops
from subclasses.dispatch.mapping import build_map_plan, can_emit
from subclasses.dispatch.resolution import find_step
from tests.subclasses.subjects import Optional, Pair, Tagged, make_pair

aten = torch.ops.aten


def text(cls, op):
    return build_map_plan(cls, op).__source__


def test_one_argument():
    assert text(Pair, aten.cos.default) == (
        "def cos_default(self):\n"
        "    _x = self\n"
        "    _layout = _x._layout\n"
        "    _out_a = _call(self.a)\n"
        "    _out_b = _call(self.b)\n"
        "    if _layout.nested:\n"
        "        _layout = _with_nested(_layout, _out_a, _out_b)\n"
        "    return _wrap(_layout, _out_a, _out_b)\n"
    )


def test_two_arguments_either_of_which_may_be_plain():
    assert text(Pair, aten.mul.Tensor) == (
        "def mul_Tensor(self, other):\n"
        "    _is_self = isinstance(self, _Cls)\n"
        "    if not _is_self:\n"
        "        _sum_gradient(self)\n"
        "    _is_other = isinstance(other, _Cls)\n"
        "    if not _is_other:\n"
        "        _sum_gradient(other)\n"
        "    _x = self if _is_self else other\n"
        "    _layout = _x._layout\n"
        "    if _is_other and (other._layout is not _layout):\n"
        "        _check_alike(_op, _x, other)\n"
        "    _out_a = _call(self.a if _is_self else self, other.a if _is_other else other)\n"
        "    _out_b = _call(self.b if _is_self else self, other.b if _is_other else other)\n"
        "    if _layout.nested:\n"
        "        _layout = _with_nested(_layout, _out_a, _out_b)\n"
        "    return _wrap(_layout, _out_a, _out_b)\n"
    )


def test_what_is_absent():
    for op in (aten.cos.default, aten.mul.Tensor, aten.view.default, aten.mul_.Tensor):
        lines = text(Pair, op)
        for absent in ("for ", "**", "[", "type(", "getattr", "tree", "dtype is not", "None"):
            assert absent not in lines, (op, absent)


def test_arguments_that_are_no_tensors_are_passed_on():
    assert "def view_default(self, *_rest):" in text(Pair, aten.view.default)
    assert "def add_Tensor(self, other, **_kwargs):" in text(Pair, aten.add.Tensor)
    assert "_call(self.a, *_rest, **_kwargs)" in text(Pair, aten.sum.dim_IntList)


def test_an_optional_inner_tensor():
    assert "_out_extra = None if _x.extra is None else _call(self.extra)" in text(Optional, aten.cos.default)


def test_dynamic_ints_are_compared_and_kept():
    lines = text(Tagged, aten.mul.Tensor)
    assert "other._layout is not _layout or other.length != _x.length" in lines
    assert "return _wrap(_layout, _out_held, _x.length)" in lines


def test_a_write_returns_the_argument_and_a_view_shares_its_storage():
    assert text(Pair, aten.mul_.Tensor).endswith("    _bump((_out_a, _out_b,))\n    return self\n")
    assert text(Pair, aten.view.default).endswith("    return _alias(_wrap(_layout, _out_a, _out_b), self)\n")


@pytest.mark.parametrize(
    "op", [aten.cat.default, aten.split.Tensor, aten.topk.default, aten.t_.default, aten.nonzero.default]
)
def test_the_general_form_takes_the_rest(op):
    assert not can_emit(op)


def test_every_op_that_can_be_written_out_compiles():
    class Box(TensorSubclass, fallback="map"):
        held: Tensor = inner()

    ops = [op for op in all_aten_ops() if find_step(Box, op) == "map" and can_emit(op)]
    assert len(ops) > 500
    for op in ops:
        assert callable(build_map_plan(Box, op))


class Product(TensorSubclass, fallback="materialize", trainable=True):
    one: Tensor = inner()
    other: Tensor = inner()

    def materialize(self):
        return self.one * self.other


def test_the_layout_follows_what_inner_tensors_become():
    x = Pair(Product(torch.ones(2), torch.ones(2)), torch.ones(2))
    doubled = x * 2
    assert type(doubled.a) is Tensor and doubled._layout is Pair(torch.ones(2), torch.ones(2))._layout
    parts = (x * 2).split(1)
    assert [part._layout for part in parts] == [doubled._layout] * 2
    state = torch.zeros_like(torch.nn.Parameter(x))
    assert state.a._layout.cotangent and dict(state._layout.nested)["a"] is state.a._layout


def test_an_error_inside_shows_the_line():
    with pytest.raises(RuntimeError) as caught:
        make_pair(3, 4).view(5)
    assert any("_out_a = _call(self.a, *_rest)" in str(entry.statement) for entry in caught.traceback)


@pytest.mark.slow
def test_texts_leave_with_their_class():
    def declare_and_run():
        class Brief(TensorSubclass, fallback="map"):
            held: Tensor = inner()

        Brief(torch.ones(2)).cos()
        return weakref.ref(Brief)

    ref = declare_and_run()
    gc.collect()
    assert ref() is None
    assert not [name for name in linecache.cache if "Brief" in name]


def test_an_error_of_torch_says_on_which_tensors_an_op_ran():
    class Mixed(TensorSubclass, size_from="wide", fallback="map"):
        narrow: Tensor = inner(dtype=torch.bfloat16)
        wide: Tensor = inner()

    x = Mixed(torch.ones(2, 2).bfloat16(), torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="same dtype") as caught:
        x @ torch.ones(2, 2)
    (note,) = caught.value.__notes__
    assert note.startswith(
        "aten.mm.default ran on each inner tensor of a Mixed: narrow (torch.bfloat16), wide (torch.float32)"
    )
    assert "@Mixed.implements(torch.ops.aten.mm.default)" in note
    with pytest.raises(DispatchError) as refused:
        x == x  # noqa: B015
    assert not hasattr(refused.value, "__notes__")
