"""Layouts are immutable and there is one of each."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from subclasses.layout import Layout, cotangent_layout, intern_layout, layout_of
from tests.subclasses.subjects import FACTORIES, Nested, Pair, Tagged, make_pair
from tests.tables import raising


@pytest.mark.parametrize("kind", FACTORIES)
def test_equal_metadata_is_one_layout(kind):
    x, y = FACTORIES[kind](), FACTORIES[kind]()
    assert x._layout is y._layout is layout_of(x)
    assert x.clone()._layout is x.detach()._layout is x._layout
    assert layout_of(x).cls is type(x)


def tagged(size=2, **metadata):
    return Tagged(torch.ones(size), **metadata)._layout


def of_pair(value):
    return intern_layout(Pair, (value,), ("a", "b"))


@dataclasses.dataclass(frozen=True)
class Config:
    factor: float
    note: str = dataclasses.field(default="", compare=False)


# By name two layouts, and whether they are one.
PAIRS = {
    "sizes and dtypes": (lambda: (make_pair(2)._layout, make_pair(3, 4).double()._layout), True),
    "dynamic ints": (lambda: (tagged(length=1), tagged(3, length=2)), True),
    "what is inside": (
        lambda: [Nested(make_pair(), rest)._layout for rest in (make_pair(), torch.ones(3, 4))],
        False,
    ),
    "what is inside, by name": (
        lambda: (NESTED._layout.nested, (("pair", NESTED.pair._layout), ("rest", NESTED.rest._layout))),
        True,
    ),
    "what its own class holds equal": (lambda: [of_pair(Config(1.0, note)) for note in ("a", "b")], True),
    **{
        f"{one} and {other}": (lambda one=one, other=other: (tagged(**one), tagged(**other)), False)
        for one, other in (
            ({"tag": "a"}, {"tag": "b"}),
            ({"mode": 1}, {"mode": True}),
            ({"mode": 1}, {"mode": 1.0}),
            ({"mode": (1,)}, {"mode": (True,)}),
            ({"mode": ((1,),)}, {"mode": ((1.0,),)}),
        )
    },
}
NESTED = Nested(make_pair(), make_pair())


@pytest.mark.parametrize("name", PAIRS)
def test_equal_metadata_is_one_layout_and_other_metadata_another(name):
    make, same = PAIRS[name]
    assert (make()[0] == make()[1]) is same
    assert make()[0] == make()[0]


def test_a_class_written_by_hand():
    x = TwoTensor(torch.ones(2), torch.ones(2))
    assert layout_of(x) is layout_of(TwoTensor(torch.ones(3), torch.ones(3)))
    assert layout_of(x).present == ("a", "b")


test_what_is_no_layout = raising(
    [
        (lambda: setattr(make_pair()._layout, "cls", Tagged), AttributeError, "A Layout is immutable"),
        (lambda: Layout(Pair, (), ("a", "b")), TypeError, "Layouts are interned"),
        (
            lambda: layout_of(torch.ones(2)),
            TypeError,
            "Expected a traceable wrapper subclass, got a Tensor",
        ),
    ]
)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_is_the_same_object(copied):
    for layout in (Tagged(torch.ones(1), tag="t")._layout, Nested(make_pair(), torch.ones(3, 4))._layout):
        assert copied(layout) is layout


def test_layouts_are_held_weakly():
    x = Tagged(torch.ones(1), tag="only here")
    ref = weakref.ref(x._layout)
    del x
    gc.collect()
    assert ref() is None


def test_threads_agree():
    found, barrier = [], threading.Barrier(8)

    def make():
        barrier.wait()
        found.append(intern_layout(Pair, ("threads",), ("a", "b")))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: make(), range(8)))
    assert len(set(map(id, found))) == 1


def test_the_layout_of_a_cotangent():
    layout = make_pair()._layout
    marked = cotangent_layout(layout)
    assert marked.cotangent and not layout.cotangent
    assert cotangent_layout(marked) is marked is cotangent_layout(layout)
    assert "cotangent" in repr(marked) and "cotangent" not in repr(layout)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Config(0.0), Config(-0.0)),
        (Config(1), Config(1.0)),
        (frozenset([1]), frozenset([True])),
        ((Config(1),), (Config(1.0),)),
    ],
)
def test_metadata_that_is_equal_and_not_the_same(one, other):
    """An equal value of a live tensor once replaced the given value."""
    first, second = of_pair(one), of_pair(other)
    assert first is not second
    assert (repr(first.statics), repr(second.statics)) == (repr((one,)), repr((other,)))
    assert of_pair(one) is first
