"""The text of mapped ops: one op, one straight line for each inner tensor."""

import gc
import linecache
import weakref

import pytest
import torch
from torch import Tensor

from subclasses import DispatchError, inner
from subclasses._torch import all_aten_ops
from subclasses.dispatch.mapping import build_map_function, can_emit
from subclasses.dispatch.resolution import find_step
from tests.subclasses.subjects import Optional, Pair, Tagged, declare, make_pair
from tests.tables import giving

aten = torch.ops.aten


def text(cls, op):
    return build_map_function(cls, op).__source__


TEXTS = {
    aten.cos.default: (
        "def cos_default(self):\n"
        "    _x = self\n"
        "    _layout = _x._layout\n"
        "    _out_a = _call(self.a)\n"
        "    _out_b = _call(self.b)\n"
        "    if _layout.nested:\n"
        "        _layout = _with_nested(_layout, _out_a, _out_b)\n"
        "    return _wrap(_layout, _out_a, _out_b)\n"
    ),
    # Either argument may be plain.
    aten.mul.Tensor: (
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
    ),
}


GENERAL = [aten.cat.default, aten.split.Tensor, aten.topk.default, aten.t_.default, aten.nonzero.default]
test_the_form_of_an_op = giving(
    {
        **{f"the text of {op}": (lambda op=op: text(Pair, op), expected) for op, expected in TEXTS.items()},
        **{f"{op} has the general form": (lambda op=op: can_emit(op), False) for op in GENERAL},
    }
)


@pytest.mark.parametrize(
    "op", [aten.cos.default, aten.mul.Tensor, aten.view.default, aten.mul_.Tensor], ids=str
)
def test_what_is_absent(op):
    lines = text(Pair, op)
    for absent in ("for ", "**", "[", "type(", "getattr", "tree", "dtype is not", "None"):
        assert absent not in lines, absent


LINES = [
    # Arguments that are not tensors are passed on.
    (Pair, aten.view.default, "def view_default(self, *_rest):"),
    (Pair, aten.add.Tensor, "def add_Tensor(self, other, **_kwargs):"),
    (Pair, aten.sum.dim_IntList, "_call(self.a, *_rest, **_kwargs)"),
    (Optional, aten.cos.default, "_out_extra = None if _x.extra is None else _call(self.extra)"),
    # Dynamic ints are compared and kept.
    (Tagged, aten.mul.Tensor, "other._layout is not _layout or other.length != _x.length"),
    (Tagged, aten.mul.Tensor, "return _wrap(_layout, _out_held, _x.length)"),
    # A write returns the argument, and a view shares its storage.
    (Pair, aten.mul_.Tensor, "    _bump((_out_a, _out_b,))\n    return self\n"),
    (Pair, aten.view.default, "    return _alias(_wrap(_layout, _out_a, _out_b), self)\n"),
]


@pytest.mark.parametrize(("cls", "op", "lines"), LINES)
def test_lines_of_a_text(cls, op, lines):
    assert lines in text(cls, op)


def test_every_op_that_can_be_written_out_compiles():
    Box = declare(keywords={"fallback": "map"})
    ops = [op for op in all_aten_ops() if find_step(Box, op) == "map" and can_emit(op)]
    assert len(ops) > 500 and all(callable(build_map_function(Box, op)) for op in ops)


Product = declare(
    keywords={"fallback": "materialize", "trainable": True},
    one=inner(),
    other=inner(),
    materialize=lambda self: self.one * self.other,
)


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
        Brief = declare(name="Brief", keywords={"fallback": "map"})
        Brief(torch.ones(2)).cos()
        return weakref.ref(Brief)

    ref = declare_and_run()
    gc.collect()
    assert ref() is None
    assert not [name for name in linecache.cache if "Brief" in name]


def test_an_error_of_torch_says_on_which_tensors_an_op_ran():
    Mixed = declare(
        name="Mixed",
        keywords={"fallback": "map", "size_from": "wide"},
        narrow=inner(dtype=torch.bfloat16),
        wide=inner(),
    )
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
