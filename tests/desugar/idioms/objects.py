"""Idioms of objects: attributes that change, members of every kind, caches, copies, metadata, type checks."""

from __future__ import annotations

import copy
import dataclasses
import weakref

import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from subclasses import TensorSubclass
from tests.desugar.classes import Beside, Halves, Labeled, Nested, Pair, Tagged, make
from tests.desugar.idioms.running import idiom


@dataclasses.dataclass
class Settings:
    scale: float = 2.0
    names: list = dataclasses.field(default_factory=list)


class Box:
    """A plain object with every kind of member."""

    factor = 2.0

    def __init__(self, scale=1.0):
        self.scale, self.calls, self.history = scale, 0, []

    def method(self, x):
        self.calls += 1
        return x * self.scale * self.factor

    @property
    def doubled(self):
        return self.scale * 2

    @doubled.setter
    def doubled(self, value):
        self.scale = value / 2

    @staticmethod
    def static(x):
        return x + 1

    @classmethod
    def of_class(cls, x):
        return x * cls.factor

    def __call__(self, x):
        self.history.append(x)
        return x * len(self.history)


class Slotted:
    __slots__ = ("extra", "scale")

    def __init__(self, scale):
        self.scale = scale


class Vector:
    """Operators of a user's class, around a tensor."""

    def __init__(self, data):
        self.data = data

    def __add__(self, other):
        return type(self)(self.data + (other.data if isinstance(other, Vector) else other))

    __radd__ = __add__

    def __getitem__(self, index):
        return type(self)(self.data[index])

    def __len__(self):
        return len(self.data)

    def __bool__(self):
        return len(self) > 2

    def __getattr__(self, name):
        if name.startswith("times_"):
            return self.data * int(name.removeprefix("times_"))
        raise AttributeError(name)


@idiom
def attribute_of_an_argument(compile_):
    fn, box, x = compile_(lambda x, box: x * box.scale), Box(), make(TwoTensor, 2, 3)
    for box.scale in (1.0, 2.0, 3):
        yield fn(x, box)
    yield fn(x, Box(5.0))


@idiom
def counter_of_an_argument(compile_):
    def fn(x, box):
        box.calls += 1
        box.last = x * box.calls
        return box.last + 1

    fn, box = compile_(fn), Box()
    for _ in range(4):
        yield fn(make(Pair, 2, 3), box), vars(box)


@idiom
def method_of_an_object(compile_):
    box, x = Box(), make(TwoTensor, 2, 3)
    fn = compile_(box.method)
    yield fn(x), box.calls
    box.scale = 3.0
    yield fn(x), box.calls
    Box.factor = 5.0
    try:
        yield fn(x), box.calls
    finally:
        Box.factor = 2.0
    yield fn(x), box.calls


@idiom
def static_and_class_methods(compile_):
    class Other(Box):
        factor = 7.0

    x = make(Pair, 2, 3)
    for fn in (Box.static, Box.of_class, Other.of_class):
        yield compile_(fn)(x)


@idiom
def callable_object(compile_):
    box, x = Box(), make(TwoTensor, 2, 3)
    fn = compile_(lambda x: box(x))
    for _ in range(3):
        yield fn(x), box.history


@idiom
def property_with_a_setter(compile_):
    def fn(x, box):
        box.doubled = box.doubled + 1
        return x * box.doubled

    fn, box = compile_(fn), Box()
    for _ in range(3):
        yield fn(make(TwoTensor, 2, 3), box), box.scale


@idiom
def attributes_by_name(compile_):
    def fn(x, box, name):
        if not hasattr(box, name):
            setattr(box, name, x)
            return x * getattr(box, "missing", 2)
        y = getattr(box, name) + x
        delattr(box, name)
        return y

    fn, box = compile_(fn), Box()
    for name in ("a", "a", "b", "b", "a"):
        yield fn(make(Pair, 2, 3), box, name), vars(box)
    box.missing = 10
    yield fn(make(Pair, 2, 3), box, "b"), vars(box)


@idiom
def slots(compile_):
    def fn(x, slotted):
        slotted.extra = x * slotted.scale
        return slotted.extra + 1

    fn, slotted = compile_(fn), Slotted(2.0)
    yield fn(make(TwoTensor, 2, 3), slotted), slotted.extra
    slotted.scale = 4.0
    yield fn(make(TwoTensor, 2, 3), slotted), slotted.extra


@idiom
def dataclass_argument(compile_):
    def fn(x, settings):
        settings.names.append(x.dim())
        other = dataclasses.replace(settings, scale=settings.scale + 1)
        return x * settings.scale + other.scale

    fn, settings, x = compile_(fn), Settings(), make(Pair, 2, 3)
    yield fn(x, settings), settings
    settings.scale = 3.0
    yield fn(x, settings), settings
    yield fn(x, Settings(5.0, ["a"])), settings


@idiom
def operators_of_a_class(compile_):
    def fn(x, y):
        v = sum([Vector(x), Vector(y)], start=1)
        return (v[0].data if v else v.data), len(v), v.times_3

    fn = compile_(fn)
    for rows in (2, 3, 4):
        yield fn(make(TwoTensor, rows, 3), make(TwoTensor, rows, 3))


@idiom
def object_made_inside(compile_):
    fn = compile_(lambda x, scale: Box(scale) if scale > 2 else Vector(x * scale))
    for scale in (1.0, 3.0, 2.0):
        yield vars(fn(make(Pair, 2, 3), scale))


@idiom
def cache_filled_by_the_first_call(compile_):
    class Lazy:
        mask = None

        def __call__(self, x):
            if self.mask is None or len(self.mask) < len(x):
                self.mask = torch.arange(float(len(x))).unsqueeze(1)
            return x * self.mask[: len(x)]

    lazy = Lazy()
    fn = compile_(lambda x: lazy(x))
    for rows in (2, 2, 4, 3):
        yield fn(make(TwoTensor, rows, 3)), lazy.mask


@idiom
def copies_of_an_argument(compile_):
    def fn(box, xs):
        other, more = copy.copy(box), copy.copy(xs)
        other.scale = 9.0
        more.append(xs[0] * other.scale)
        return more, other is box

    fn, box, xs = compile_(fn), Box(), [make(Pair, 2, 3)]
    yield fn(box, xs), box.scale, len(xs)
    xs.append(xs[0])
    yield fn(box, xs), box.scale, len(xs)


@idiom
def deep_copy_of_an_argument(compile_):
    def fn(settings, x):
        other = copy.deepcopy(settings)
        other.names.append("inside")
        return x * settings.scale, other

    fn, settings = compile_(fn), Settings()
    for settings.scale in (1.0, 2.0):
        yield fn(settings, make(TwoTensor, 2, 3)), settings


@idiom
def weak_reference(compile_):
    fn, boxes, x = (
        compile_(lambda x, ref: x if ref() is None else x * ref().scale),
        [Box(2.0)],
        make(Pair, 2, 3),
    )
    ref = weakref.ref(boxes[0])
    yield fn(x, ref)
    boxes[0].scale = 3.0
    yield fn(x, ref)
    boxes.clear()
    yield fn(x, ref)


@idiom
def attribute_of_a_tensor(compile_):
    def fn(x):
        x.tag = getattr(x, "tag", 0) + 1
        y = x * x.tag
        y.origin = "inside"
        return y

    fn, x = compile_(fn), make(Tensor, 2, 3)
    for _ in range(3):
        y = fn(x)
        yield y, x.tag, getattr(y, "origin", None)
    x.tag = 10
    yield fn(x), x.tag


@idiom
def attribute_of_a_wrapper(compile_):
    def fn(x):
        return x * getattr(x, "importance", 2.0)

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    yield fn(x)
    x.importance = 3.0
    yield fn(x)
    x.importance = 4.0
    yield fn(x)
    del x.importance
    yield fn(x)


@idiom
def metadata_of_an_argument(compile_):
    fn = compile_(lambda x: x * x.count if x.label == "x" else x + x.count)
    one = make(Labeled, 2, 3)
    for label, count in (("x", 3), ("y", 3), ("x", 4), ("x", 5), ("z", 3)):
        yield fn(Labeled(one.data_, one.extra, label=label, count=count))
    yield fn(Labeled(one.data_, label="x"))


@idiom
def metadata_changed_by_hand(compile_):
    fn, x = compile_(lambda x: (x * 2, x.tag)), make(Tagged, 2, 3)
    for x.tag in ("left", "right", "left", "other"):
        yield fn(x)


@idiom
def inner_tensor_replaced_between_calls(compile_):
    fn, x = compile_(lambda x: (x * 2, x.a + 1)), make(TwoTensor, 2, 3)
    yield fn(x)
    x.a = torch.ones(2, 3)
    yield fn(x)
    x.b.fill_(4)
    yield fn(x)


@idiom
def type_checks(compile_):
    def fn(x):
        kinds = (
            type(x) is Tensor,
            isinstance(x, TwoTensor),
            isinstance(x, TensorSubclass),
            issubclass(type(x), Tensor),
        )
        if type(x) is Tensor:
            return x * 2, kinds
        return (x + 1 if isinstance(x, (Pair, Halves)) else x - 1), type(x).__name__

    fn = compile_(fn)
    for cls in (Tensor, TwoTensor, Pair, Halves, Tensor, Beside, Nested):
        yield fn(make(cls, 2, 6))


@idiom
def match_statement(compile_):
    def fn(value):
        match value:
            case {"x": Tensor() as x, **rest}:
                return x * len(rest)
            case [first, *others] if others:
                return first - len(others)
            case Settings(scale=scale):
                return scale
            case int() | float():
                return value + 1
        return None

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    for value in ({"x": x}, {"x": x, "y": 1}, [x, x], [x], Settings(3.0), 4, 5.0, "text"):
        yield fn(value)
