"""Classes as somebody else may have written them, each made anew for a test, since adopting changes a class."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

import subclasses


@dataclass
class Settings:
    """Metadata that can change and cannot be hashed."""

    bits: int
    names: list[str]


class Options:
    """Metadata that is compared by identity."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


class Shape(NamedTuple):
    rows: int
    columns: int


class Base(Tensor):
    """An inner tensor, with attributes as metadata; an op runs on the inner tensor."""

    raw: Any

    @staticmethod
    def __new__(cls, raw, **attributes):
        self = Tensor._make_wrapper_subclass(cls, raw.shape, strides=raw.stride(), dtype=raw.dtype)
        self.raw = raw
        self.__dict__.update(attributes)
        return self

    def __init__(self, raw, **attributes):
        pass

    def __repr__(self, *, tensor_contents=None):
        return f"{type(self).__name__}({self.raw})"

    def __tensor_flatten__(self):
        return ["raw"], dict(self.attributes())

    def attributes(self):
        return {name: getattr(self, name) for name in self.names}

    names: tuple[str, ...] = ()

    @classmethod
    def __tensor_unflatten__(cls, inner_tensors, context, outer_size, outer_stride):
        return cls(inner_tensors["raw"], **context)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        like = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, cls))
        raw = pytree.tree_map_only(cls, lambda x: x.raw, (args, kwargs or {}))
        out = func(*raw[0], **raw[1])
        attributes = {name: getattr(like, name) for name in type(like).names}
        return pytree.tree_map_only(Tensor, lambda t: type(like)(t, **attributes), out)


class NoContext(Base):
    """Built of its inner tensor alone, whatever its context says."""

    @classmethod
    def __tensor_unflatten__(cls, inner_tensors, context, outer_size, outer_stride):
        return cls(inner_tensors["raw"])


def written(name: str, base: type = Base, **body: Any) -> Any:
    return type(name, (base,), body)


def tagged():
    """A class with a list, a float and a flag."""
    cls = written("Tagged", names=("axes", "factor", "flag"))
    return cls, lambda **other: cls(
        torch.ones(2, 3), **({"axes": [0, 1], "factor": 2.0, "flag": True} | other)
    )


def optional():
    """A class with an inner tensor that may be missing."""
    cls = written(
        "Optional",
        names=("scale", "kind"),
        __tensor_flatten__=lambda self: (
            ["raw"] + ["scale"] * (self.scale is not None),
            {"kind": self.kind},
        ),
        __tensor_unflatten__=classmethod(
            lambda cls, inner_tensors, context, outer_size, outer_stride: cls(
                inner_tensors["raw"], scale=inner_tensors.get("scale"), **context
            )
        ),
    )
    return cls, lambda **other: cls(torch.ones(2, 3), **({"scale": None, "kind": "a"} | other))


def with_settings():
    """A class with a dataclass that can change."""
    cls = written("WithSettings", names=("settings",))
    return cls, lambda **other: cls(torch.ones(2, 3), **({"settings": Settings(4, ["a"])} | other))


def with_object():
    """A class whose metadata is read from an object of a class of its own."""
    cls = written(
        "WithObject",
        names=("options",),
        __tensor_flatten__=lambda self: (["raw"], [self.options.factor]),
        __tensor_unflatten__=classmethod(
            lambda cls, inner_tensors, context, outer_size, outer_stride: cls(
                inner_tensors["raw"], options=Options(*context)
            )
        ),
    )
    return cls, lambda **other: cls(torch.ones(2, 3), **({"options": Options(2.0)} | other))


def with_sizes():
    """A class whose metadata follows from the sizes of an inner tensor."""
    flatten = lambda self: (["raw"], [Shape(*self.raw.shape), self.dtype])  # noqa: E731
    cls = written("WithSizes", NoContext, __tensor_flatten__=flatten)
    return cls, lambda **other: cls(other.get("raw", torch.ones(2, 3)))


def counting():
    """A class whose metadata is another one at each call."""
    numbers = itertools.count()
    flatten = lambda self: (["raw"], {"number": next(numbers)})  # noqa: E731
    cls = written("Counting", NoContext, __tensor_flatten__=flatten)
    return cls, lambda **other: cls(torch.ones(2, 3))


def adopted(kind, **options):
    """One of the classes above, adopted, and the function that makes a value of it."""
    cls, make = globals()[kind]()
    return subclasses.adopt(cls, **options), make
