"""Evaluates Dynamo's expressions in a call, and compares its wrappers' metadata with an earlier program's."""

from __future__ import annotations

import functools
import re
import reprlib
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import Tensor

from desugar.ir.values import Value, Wrapper, is_wrapper, take_apart
from desugar.program import Program
from subclasses import TensorSubclass
from subclasses.errors import one_of
from subclasses.layout import field_name

# --------------------------------------------------------------------------------------------------- the values

UNKNOWN = type("Unknown", (), {"__repr__": lambda self: "?"})()
_ROOT = re.compile(r"G\['(\w+)'\]|(\w+)")
_STEP = re.compile(r"\.(size|stride)\(\)\[(\d+)\]|\.(\w+)|\['([^']*)'\]|\[(\d+)\]")


def find_value(path: str, frame: Mapping[str, Any], scope: Mapping[str, Any]) -> Any:
    """Evaluates a Dynamo expression with local variables `frame` and global variables `scope`.

    Returns `UNKNOWN` if it is not a path of attributes, keys and indices, or if a step does not exist or raises.
    """
    root = _ROOT.match(path)
    if root is None:
        return UNKNOWN
    value, position = (scope.get(root[1], UNKNOWN) if root[1] else frame.get(root[2], UNKNOWN)), root.end()
    while position < len(path) and value is not UNKNOWN:
        step = _STEP.match(path, position)
        if step is None:
            return UNKNOWN
        try:
            value = _take_step(value, step)
        except Exception:  # noqa: BLE001 - a user's own __getattr__ or __getitem__ may raise anything
            return UNKNOWN
        position = step.end()
    return value


def _take_step(value: Any, step: re.Match[str]) -> Any:
    extents, dim, attribute, key, index = step.groups()
    if extents is not None:
        return getattr(value, extents)(int(dim))
    if attribute is not None:
        return getattr(value, attribute)
    return value[key if key is not None else int(index)]


def unless_unknown(read: Callable[[Any], Any], value: Any) -> Any:
    """Returns `read(value)`; `UNKNOWN` if the value is unknown or `read` raises."""
    if value is UNKNOWN:
        return UNKNOWN
    try:
        return read(value)
    except Exception:  # noqa: BLE001 - a user's own __len__ or keys may raise anything
        return UNKNOWN


def short(value: Any) -> str:
    """Formats a value in a few words: a tensor by its type, a function and a class by its name."""
    if isinstance(value, Tensor):
        return f"{one_of(type(value))}"
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, FunctionType):
        return value.__qualname__.replace("<locals>.", "")
    if isinstance(value, BuiltinFunctionType):  # such as torch.sin, whose type has no name of torch's
        return value.__name__
    return _REPR.repr(value)


# Reads only the beginning of a long list, and survives an error in the `__repr__` of an item.
_REPR = reprlib.Repr()
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = _REPR.maxset = 10
_REPR.maxstring = _REPR.maxother = 80


# -------------------------------------------------------------------------------------------------- the layouts


def value_named(name: str, program: Program | None) -> Value | None:
    """Returns the value of an argument of a program, or of an inner tensor of one, by the user's name."""
    if program is None:
        return None
    for known, value in zip(program.names, program.inputs, strict=False):
        if name == known:
            return value
        if name.startswith(f"{known}."):
            return functools.reduce(_inner, name.removeprefix(f"{known}.").split("."), value)
    return None


def _inner(value: Value | None, field: str) -> Value | None:
    return dict(value.inner).get(field) if isinstance(value, Wrapper) else None


def compare_metadata(name: str, value: Value, leaf: Any) -> str | None:
    """Describes the first difference of a wrapper's metadata, or an inner wrapper's, from an earlier program's value.

    Returns None if the metadata is equal or the types differ.
    """
    if not isinstance(value, Wrapper) or not is_wrapper(leaf) or type(leaf) is not value.cls:
        return None
    names, context = take_apart(leaf)
    if isinstance(leaf, TensorSubclass):
        fields = zip(type(leaf).__spec__.statics, value.context.statics, context.statics, strict=True)
        for static, expected, got in fields:
            if expected != got:
                return f"{name}.{static.name}: expected {expected!r}, got {got!r}"
    present = tuple(field for field, _ in value.inner)
    if present != names:
        expected, got = (", ".join(map(field_name, found)) for found in (present, names))
        return f"inner tensors of {name}: expected {expected}, got {got}"
    found = (
        compare_metadata(f"{name}.{field_name(field)}", part, getattr(leaf, field))
        for field, part in value.inner
    )
    inside = next(filter(None, found), None)
    if inside is None and value.context != context:
        return f"metadata of {name}: expected {short(value.context)}, got {short(context)}"
    return inside
