"""Idioms of objects and tensors: attributes that change, members of every kind, copies, branches on data, writes."""

from __future__ import annotations

import copy
import dataclasses
import weakref

import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from subclasses import TensorSubclass
from subclasses.ragged import JaggedTensor
from tests.desugar.classes import Beside, Halves, Labeled, Nested, Pair, Tagged, make
from tests.desugar.idioms.running import (
    again,
    between,
    idiom,
    idioms_of_calls,
    idioms_of_changes,
    put,
    raised,
    trained,
    wrapper,
)


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


class Other(Box):
    """A class that has another attribute of its own."""

    factor = 7.0


# ------------------------------------------------------------------------------------- members and attributes


def counting(x, box):
    box.calls += 1
    box.last = x * box.calls
    return box.last + 1


def setting_a_property(x, box):
    box.doubled = box.doubled + 1
    return x * box.doubled


def by_name(x, box, name):
    if not hasattr(box, name):
        setattr(box, name, x)
        return x * getattr(box, "missing", 2)
    y = getattr(box, name) + x
    delattr(box, name)
    return y


def filling_a_slot(x, slotted):
    slotted.extra = x * slotted.scale
    return slotted.extra + 1


def of_a_dataclass(x, settings):
    settings.names.append(x.dim())
    other = dataclasses.replace(settings, scale=settings.scale + 1)
    return x * settings.scale + other.scale


def copying(box, xs):
    other, more = copy.copy(box), copy.copy(xs)
    other.scale = 9.0
    more.append(xs[0] * other.scale)
    return more, other is box


def copying_deeply(settings, x):
    other = copy.deepcopy(settings)
    other.names.append("inside")
    return x * settings.scale, other


idioms_of_calls(
    {
        "attribute_of_an_argument": (
            lambda x, box: x * box.scale,
            lambda fn, x: (fn(x, box) for box in [Box()] for box.scale in (1.0, 2.0, 3, 5.0)),
        ),
        "attribute_of_another_argument": (
            lambda x, box: x * box.scale,
            lambda fn, x: (fn(x, Box(scale)) for scale in (1.0, 5.0)),
        ),
        "counter_of_an_argument": (
            counting,
            lambda fn, x: ((fn(x, box), vars(box)) for box in [Box()] for _ in range(4)),
            Pair,
        ),
        "static_method": (Box.static, lambda fn, x: fn(x), Pair),
        "class_method": (Box.of_class, lambda fn, x: fn(x), Pair),
        "inherited_class_method": (Other.of_class, lambda fn, x: fn(x), Pair),
        "property_with_a_setter": (
            setting_a_property,
            lambda fn, x: ((fn(x, box), box.scale) for box in [Box()] for _ in range(3)),
        ),
        "attributes_by_name": (
            by_name,
            lambda fn, x: (
                (fn(x, box, name), vars(box)) for box in [Box()] for name in ("a", "a", "b", "b", "a")
            ),
            Pair,
        ),
        "attributes_by_name_beside_another": (
            by_name,
            lambda fn, x: ((fn(x, box, "b"), vars(box)) for box in [Box()] for box.missing in (10, 11)),
            Pair,
        ),
        "slots": (
            filling_a_slot,
            lambda fn, x: (
                (fn(x, slotted), slotted.extra) for slotted in [Slotted(1.0)] for slotted.scale in (2.0, 4.0)
            ),
        ),
        "dataclass_argument": (
            of_a_dataclass,
            lambda fn, x: (
                (fn(x, settings), settings)
                for one in [Settings()]
                for settings, settings.scale in ((one, 2.0), (one, 3.0), (Settings(names=["a"]), 5.0))
            ),
            Pair,
        ),
        "object_made_inside": (
            lambda x, scale: Box(scale) if scale > 2 else Settings(x * scale),
            lambda fn, x: (vars(fn(x, scale)) for scale in (1.0, 3.0, 2.0)),
            Pair,
        ),
        "copies_of_an_argument": (
            copying,
            lambda fn, x: ((fn(box, xs), box.scale, len(xs)) for box in [Box()] for xs in ([x], [x, x])),
            Pair,
        ),
        "deep_copy_of_an_argument": (
            copying_deeply,
            lambda fn, x: (
                (fn(settings, x), settings) for settings in [Settings()] for settings.scale in (1.0, 2.0)
            ),
        ),
    }
)


def set_factor(value):
    return lambda held: setattr(Box, "factor", value)


idioms_of_changes(
    {
        "method_of_an_object": (
            Box,
            *(lambda box: box.method, lambda fn, box: (fn(wrapper()), box.calls)),
            *(put(scale=3.0), set_factor(5.0), set_factor(2.0)),
        ),
        "callable_object": (
            Box,
            *(lambda box: lambda x: box(x), lambda fn, box: (fn(wrapper()), box.history), again, again),
        ),
        "weak_reference": (
            lambda: (lambda box: {"box": box, "ref": weakref.ref(box)})(Box(2.0)),
            lambda held: lambda x, ref: x if ref() is None else x * ref().scale,
            lambda fn, held: fn(make(Pair, 2, 3), held["ref"]),
            lambda held: setattr(held["box"], "scale", 3.0),
            lambda held: held.pop("box") and None,
        ),
    }
)

# ------------------------------------------------------------------------- attributes and metadata of tensors


def tagging(x):
    x.tag = getattr(x, "tag", 0) + 1
    y = x * x.tag
    y.origin = "inside"
    return y


def of_its_type(x):
    kinds = (
        type(x) is Tensor,
        isinstance(x, TwoTensor),
        isinstance(x, TensorSubclass),
        issubclass(type(x), Tensor),
    )
    if type(x) is Tensor:
        return x * 2, kinds
    return (x + 1 if isinstance(x, (Pair, Halves)) else x - 1), type(x).__name__


def matching(value):
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


idioms_of_calls(
    {
        "attribute_of_a_tensor": (
            tagging,
            lambda fn, x: between(
                lambda: [(y, x.tag, getattr(y, "origin", None)) for y in [fn(x)]],
                *(lambda: None, lambda: None, lambda: setattr(x, "tag", 10)),
            ),
            Tensor,
        ),
        "attribute_of_a_wrapper": (
            lambda x: x * getattr(x, "importance", 2.0),
            lambda fn, x: between(
                lambda: fn(x),
                lambda: setattr(x, "importance", 3.0),
                lambda: setattr(x, "importance", 4.0),
                lambda: delattr(x, "importance"),
            ),
        ),
        "metadata_of_an_argument": (
            lambda x: x * x.count if x.label == "x" else x + x.count,
            lambda fn, x: (
                fn(Labeled(x.data_, extra, label=label, count=count))
                for extra, label, count in (
                    *((x.extra, "x", 3), (x.extra, "y", 3), (x.extra, "x", 4)),
                    *((x.extra, "x", 5), (x.extra, "z", 3), (None, "x", 2)),
                )
            ),
            Labeled,
        ),
        "metadata_changed_by_hand": (
            lambda x: (x * 2, x.tag),
            lambda fn, x: (fn(x) for x.tag in ("left", "right", "left", "other")),
            Tagged,
        ),
        "inner_tensor_replaced_between_calls": (
            lambda x: (x * 2, x.a + 1),
            lambda fn, x: between(
                lambda: fn(x), lambda: setattr(x, "a", torch.ones(2, 3)), lambda: x.b.fill_(4)
            ),
        ),
        "type_checks": (
            of_its_type,
            lambda fn, x: (
                fn(make(cls, 2, 6)) for cls in (Tensor, TwoTensor, Pair, Halves, Tensor, Beside, Nested)
            ),
        ),
        "match_statement": (
            matching,
            lambda fn, x: (
                fn(value)
                for value in ({"x": x}, {"x": x, "y": 1}, [x, x], [x], Settings(3.0), 4, 5.0, "text")
            ),
        ),
    }
)


# ------------------------------------------------------------------------------------------------ data in Python


def item_in_a_branch(x):
    total = x.sum().item()
    return x * 2 if total > 0 else x - 1, total


def while_on_data(x):
    steps = 0
    while x.abs().max() > 0.1:
        x = x / 2
        steps += 1
    return x, steps


idioms_of_calls(
    {
        "item_in_a_branch": (item_in_a_branch, lambda fn, x: (fn(value) for value in (x, -x, x * 2))),
        "branch_on_data": (
            lambda x, flag: (lambda y: y + 1 if flag else y - 1)(x * 2 if x.sum() > 0 else x),
            lambda fn, x: (fn(value, torch.tensor(flag)) for value in (x, -x) for flag in (True, False)),
        ),
        "while_on_data": (
            while_on_data,
            lambda fn, x: ((fn(make(Tensor, 2, 3) * scale), fn(x * scale)[1]) for scale in (1, 4, 0.01)),
        ),
        "tolist_and_loop": (
            lambda x, lengths: [
                part * n for n, part in zip(lengths.tolist(), x.split(lengths.tolist()), strict=True)
            ],
            lambda fn, x: (fn(x, torch.tensor(lengths)) for lengths in ([2, 1], [1, 2], [1, 1, 1])),
            *(TwoTensor, 3, 2),
        ),
        "nonzero_and_masks": (
            lambda x: (x[x > 0], x.nonzero(), x.clamp(min=0).unique().numel()),
            lambda fn, x: (fn(make(Tensor, 3, 4)) for _ in range(3)),
        ),
        "numpy_inside": (
            lambda x, y: (x * torch.from_numpy(y.numpy() * 2), float(y.numpy().sum())),
            lambda fn, x: (fn(make(TwoTensor, 2, n), torch.arange(float(n))) for n in (3, 4)),
        ),
        "iterating_over_a_tensor": (
            lambda x: ([row * 2 for row in x], sum(x), len(x), x[0] in [None]),
            lambda fn, x: (fn(make(TwoTensor, rows, 3)) for rows in (2, 3, 1)),
        ),
        "tensor_equality_as_a_bool": (
            lambda x, y: x * 2 if torch.equal(x, y) else x + y,
            lambda fn, x: (fn(x, x.clone()), fn(x, x + 1), fn(x, x)),
        ),
    }
)

# ----------------------------------------------------------------------------------------------------- writes


def writing(x, y):
    x.mul_(2)
    y[0] = x[1]
    return x + y


def writing_by_position(cache, x, position):
    cache[position : position + len(x)] = x
    return cache[: position + len(x)].sum(0)


def swapping(state):
    state[0], state[1] = state[1] * 2, state[0]
    return state[0] + state[1]


idioms_of_calls(
    {
        "writes_to_arguments": (
            writing,
            lambda fn, x: ((fn(x, y), x, y, x._version) for y in [make(TwoTensor, 2, 3)] for _ in range(3)),
        ),
        "cache_written_by_position": (
            writing_by_position,
            lambda fn, x: (
                (fn(x, make(TwoTensor, rows, 4), position), x)
                for position, rows in ((0, 3), (3, 1), (4, 1), (5, 2))
            ),
            *(TwoTensor, 8, 4),
        ),
        "swapped_every_call": (
            swapping,
            lambda fn, x: ((fn(state), state) for state in [[x, make(Pair, 2, 3)]] for _ in range(3)),
            Pair,
        ),
    }
)


@idiom
def result_fed_back(compile_):
    fn, x = compile_(lambda x: (x * 2, x.sin())), make(TwoTensor, 2, 3, grad=True)
    y = fn(fn(x)[0])[0]
    yield y
    yield trained(lambda y: fn(y)[0], y), x


# ------------------------------------------------------------------------------------- keys, classes and types


class Doubling(Tensor):
    """Runs a function, whatever the op."""

    @staticmethod
    def __new__(cls, data, run):
        return torch.Tensor._make_wrapper_subclass(cls, data.size())

    def __init__(self, data, run):
        self.data_, self.run = data, run

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return list(args[0].run(args[0].data_))


def copying_a_tensor(x):
    one, two = copy.copy(x), copy.deepcopy(x)
    two.mul_(2)
    return one, two, one is x


idioms_of_calls(
    {
        "called_inside_a_dispatch": (
            lambda x: (x * 2).unbind(),
            lambda fn, x: (Doubling(make(Tensor, n, 3), fn).unbind() for n in (2, 3)),
        ),
        "type_changes_between_calls": (
            lambda x: (x * 2 + 1).sum(0),
            lambda fn, x: (
                trained(fn, make(cls, 2, 6, grad=True))
                for cls in (Tensor, TwoTensor, Pair, Tagged, Labeled, Halves, Tensor, TwoTensor)
            ),
        ),
        "copies_of_a_tensor": (copying_a_tensor, lambda fn, x: ((fn(y), y) for y in (make(Tensor, 2, 3), x))),
        "copy_of_a_declared_tensor": (
            lambda x: copy.copy(x) * 2,
            lambda fn, x: (fn(make(Pair, 2, 3)) for _ in range(2)),
        ),
        "deep_copy_of_a_declared_tensor": (
            lambda x: copy.deepcopy(x).mul_(2),
            lambda fn, x: ((fn(x), x) for x in (make(Pair, 2, 3), make(Pair, 2, 3))),
        ),
        "ragged_rows_of_new_lengths": (
            lambda x, scale: ((x * scale).sum(1), x.values, len(x)),
            lambda fn, x: (
                fn(JaggedTensor.from_tensors([torch.randn(n, 3) for n in lengths]), len(lengths))
                for lengths in ((2, 3), (1, 4, 2), (5,), (2, 2), (3, 1, 1, 1))
            ),
        ),
        "dtype_changes_between_calls": (
            lambda x, y: (x * y).to(torch.float32) if x.dtype.is_floating_point else x + y,
            lambda fn, x: (
                [
                    fn(z, y)
                    for dtype in (torch.float32, torch.float64, torch.bfloat16)
                    for z in [x.to(dtype)]
                    for y in (z, torch.ones(3), 2)
                ],
                fn(torch.arange(3), 2),
                raised(fn, torch.arange(3), None),
            ),
        ),
    }
)


idioms_of_changes(
    {
        "weak_dictionary_of_tensors": (
            weakref.WeakKeyDictionary,
            lambda known: lambda x, box: (known.update({box: known.get(box, 0) + 1}), x * known[box])[1],
            lambda fn, known: (
                (fn(make(Pair, 2, 3), boxes[n]), list(known.values()))
                for boxes in [[nn.Identity(), nn.Identity()]]
                for n in (0, 1, 0)
            ),
        ),
        "identity_as_a_key": (
            dict,
            lambda known: lambda x: (lambda y: y if known.setdefault(id(x), len(known)) else y * 2)(x + 1),
            lambda fn, known: (
                (fn(value), list(known.values())) for x, y in [(wrapper(), wrapper())] for value in (x, y, x)
            ),
        ),
    }
)
