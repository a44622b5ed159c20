"""Writes records as JSON and reads them.

The annotations of the records (:mod:`desugar.packages.manifest.records`) are the schema, which is closed. :func:`check`
compares each written or read value with its annotation. JSON holds None, bools, ints and strings unchanged, and a tuple
as a list. Any other value is an object with the name of its class, and its fields or its value.
"""

from __future__ import annotations

import functools
import keyword
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch

from desugar.errors import PackageError
from desugar.packages.manifest.records import RECORDS, Text, Word, fields_of
from subclasses.errors import full_name
from subclasses.layout import Layout, intern_layout

KIND, VALUE = "is", "value"  # keys of an object: the name of its class; its value
_LAYOUT = tuple[type, tuple[Any, ...], tuple[str, ...], tuple[tuple[str, Any], ...]]
_NAMED = (torch.dtype, torch.memory_format, torch.layout)
_BUILTIN: Mapping[str, type] = {cls.__name__: cls for cls in (tuple, list, dict, torch.Size)}

# ------------------------------------------------------------------------------------------------- writing


class Writer:
    """Writes records and constants.

    Attributes:
        classes: The classes written so far, by their names in the manifest.
    """

    def __init__(self) -> None:
        self.classes: dict[str, type] = {}

    def write(self, value: Any) -> Any:
        """Returns a value as JSON data.

        Raises:
            PackageError: A part of the value cannot be written.
        """
        cls: Any = type(value)
        if value is None or cls in (bool, int, str):
            return value
        if cls is tuple:
            return [self.write(item) for item in value]
        if RECORDS.get(cls.__name__) is cls:
            return {KIND: cls.__name__, **{name: self.write(getattr(value, name)) for name in fields_of(cls)}}  # type: ignore[union-attr]
        if isinstance(value, type):
            return {KIND: "class", VALUE: self._name_of(value)}
        return {KIND: cls.__name__, VALUE: self._value_of(value)}

    def _value_of(self, constant: Any) -> Any:
        cls = type(constant)
        if cls in (list, frozenset):
            return [self.write(item) for item in (constant if cls is list else sorted(constant, key=repr))]
        if cls is dict:
            return self.write(tuple(constant.items()))
        if cls is Layout:
            return self.write((constant.cls, constant.statics, constant.present, constant.nested))
        if cls in (float, torch.device, *_NAMED):
            return str(constant).removeprefix("torch.")
        raise PackageError(f"a package cannot hold {constant!r:.100} of type {cls.__qualname__}")

    def _name_of(self, cls: Any) -> str:
        if cls in _BUILTIN.values():
            return cls.__name__  # type: ignore[no-any-return]
        of_values = cls._value_cls if getattr(cls, "_is_cotangent", False) else cls
        self.classes[full_name(of_values)] = of_values
        return "cotangent " * (cls is not of_values) + full_name(of_values)


# ------------------------------------------------------------------------------------------------- reading


class Reader:
    """Reads records and constants.

    Args:
        classes: Name in the manifest -> class.
        others: Kind of an object -> the function that reads its value, for additional kinds.
    """

    def __init__(
        self, classes: Mapping[str, type], others: Mapping[str, Callable[[Any], Any]] = MappingProxyType({})
    ) -> None:
        self._classes = {**_BUILTIN, **classes}
        self._makers: dict[str, Callable[[Any], Any]] = {
            "list": lambda data: [self._read(item) for item in data],
            "frozenset": lambda data: frozenset(map(self._read, data)),
            "dict": lambda data: dict(self._read(data)),
            "float": float,
            "device": torch.device,
            **{cls.__name__: _named(cls) for cls in _NAMED},
            "Layout": self._read_layout,
            "class": self._find_class,
            **others,
        }

    def read(self, data: Any, kind: Any) -> Any:
        """Returns the value that JSON data describes.

        Raises:
            PackageError: The value does not match the annotation `kind`.
        """
        try:
            value = self._read(data)
            check(value, kind)
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise PackageError(
                f"the manifest of this package does not fit its schema ({type(error).__name__}: {error})"
            ) from error
        return value

    def _read(self, data: Any) -> Any:
        if type(data) is list:
            return tuple([self._read(item) for item in data])
        if type(data) is not dict:
            return data
        if (cls := RECORDS.get(data[KIND])) is None:
            return self._makers[data[KIND]](data[VALUE])
        return cls(*[self._read(data[name]) for name in fields_of(cls)])  # type: ignore[union-attr]

    def _read_layout(self, data: Any) -> Layout:
        parts = self._read(data)
        check(parts, _LAYOUT)
        return intern_layout(*parts)

    def _find_class(self, name: str) -> Any:
        kind, _, name = name.rpartition(" ")
        cls: Any = self._classes[name]
        return cls.Cotangent if kind else cls


@functools.cache
def _named(cls: type) -> Callable[[str], Any]:
    """Returns a function that finds a dtype, memory format or layout of torch by its name."""
    constants = (value for value in vars(torch).values() if isinstance(value, cls))
    return {str(value).removeprefix("torch."): value for value in constants}.__getitem__


# ------------------------------------------------------------------------------------------------ checking


def check(value: Any, kind: Any) -> None:
    """Raises `PackageError` unless a value and all its parts match an annotation."""
    origin, choices, _ = _parts_of(kind)
    if origin is types.UnionType:
        kind = next((one for one in choices if _is_of(value, one)), kind)
    if kind is Any:
        return
    if not _is_of(value, kind):
        raise PackageError(f"a package cannot hold {value!r:.80} in place of {kind}")
    if kind in (str, Word) and (not value.isidentifier() or keyword.iskeyword(value)):
        raise PackageError(f"{value!r} is not a name that a package can hold")
    if kind is str and value.startswith("__"):
        raise PackageError(f"{value!r} is not a name of an inner tensor")
    for part, of in _annotated(value, kind):
        check(part, of)


def _annotated(value: Any, kind: Any) -> Iterable[tuple[Any, Any]]:
    """Returns the parts of a value with their annotations."""
    origin, arguments, cls = _parts_of(kind)
    if cls is dict:
        return [(pair, tuple[arguments]) for pair in value.items()]
    if origin is tuple and arguments[-1] is not Ellipsis:
        return zip(value, arguments, strict=True)
    if origin in (tuple, frozenset):
        return [(item, arguments[0]) for item in value]
    return [(getattr(value, name), of) for name, of in (fields_of(cls) or {}).items()]


def _is_of(value: Any, kind: Any) -> bool:
    origin, arguments, cls = _parts_of(kind)
    if origin is Literal:
        return value in arguments
    return isinstance(value, type) if kind is type else type(value) is cls


@functools.cache
def _parts_of(kind: Any) -> tuple[Any, tuple[Any, ...], Any]:
    """Returns the origin and the arguments of an annotation, and the class of its values."""
    origin = types.UnionType if typing.get_origin(kind) is typing.Union else typing.get_origin(kind)
    classes = {None: types.NoneType, Word: str, Text: str, Mapping[int, int]: dict}
    return origin, typing.get_args(kind), classes.get(kind, origin or kind)
