"""Writes records as JSON, and reads them again by the types of their fields.

The schema is closed: it is the annotations of the records. A record is an object with exactly the names of its fields,
and, where a field takes records of several classes, the name of its class. What is not of the annotated type raises an
error that names the place in the manifest.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import torch

from desugar.errors import PackageError

_KIND = "is"  # the name of an object's class

# dtype, device, ... -> how it is written and read.
_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_MEMORY_FORMATS = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.memory_format)
}
_LAYOUTS = {"strided": torch.strided}


class Codec:
    """Writes and reads records.

    Attributes:
        constants: Classes of records that may stand where a field takes any constant.
        classes: Class -> its name in the manifest.
    """

    def __init__(self, constants: tuple[type, ...], classes: Mapping[str, type]) -> None:
        self.constants = {cls.__name__: cls for cls in constants}
        self.classes = classes
        self._names = {cls: name for name, cls in classes.items()}

    # ................................................................................................ writing

    def write(self, value: Any, kind: Any) -> Any:
        """Returns a value as JSON data.

        Args:
            value: The value.
            kind: Its annotation.

        Raises:
            PackageError: A part of it cannot be written.
        """
        if kind is Any:
            return self._write_constant(value)
        if kind is type:
            return self._write_class(value)
        if _is_union(kind):
            return self._write_one_of(value, typing.get_args(kind))
        if dataclasses.is_dataclass(kind):
            return self._write_record(value)
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin is tuple and arguments[-1] is not Ellipsis:
            return [self.write(item, of) for item, of in zip(value, arguments, strict=True)]
        if origin in (tuple, frozenset):
            items = value if origin is tuple else sorted(value)
            return [self.write(item, arguments[0]) for item in items]
        if kind in (torch.dtype, torch.device):
            return str(value).removeprefix("torch.")
        if kind is float:
            return repr(value)
        assert kind in (int, str, bool, types.NoneType), kind
        return value

    def _write_one_of(self, value: Any, kinds: tuple[Any, ...]) -> Any:
        if dataclasses.is_dataclass(value):
            return {_KIND: type(value).__name__, **self._write_record(value)}
        kind = next(of for of in kinds if not dataclasses.is_dataclass(of) and _is_of(value, of))
        return self.write(value, kind)

    def _write_record(self, record: Any) -> dict[str, Any]:
        hints = _fields_of(type(record))
        return {name: self.write(getattr(record, name), kind) for name, kind in hints.items()}

    def _write_class(self, cls: type) -> str:
        if cls not in self._names:
            raise PackageError(f"the class {cls.__qualname__} is not known to the package")
        return self._names[cls]

    def _write_constant(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | str) or type(value) is int:
            return value
        if type(value) is float:
            return {_KIND: "float", "value": repr(value)}
        if isinstance(value, torch.dtype | torch.device | torch.memory_format | torch.layout):
            return {_KIND: type(value).__name__, "value": str(value).removeprefix("torch.")}
        if type(value) in (tuple, list, frozenset):
            items = sorted(value, key=repr) if type(value) is frozenset else value
            return {_KIND: type(value).__name__, "items": [self._write_constant(item) for item in items]}
        if isinstance(value, type) and value in self._names:
            return {_KIND: "class", "value": self._names[value]}
        if type(value).__name__ in self.constants and dataclasses.is_dataclass(value):
            return {_KIND: type(value).__name__, **self._write_record(value)}
        raise PackageError(f"a package cannot hold {value!r:.100} of type {type(value).__qualname__}")

    # ................................................................................................ reading

    def read(self, data: Any, kind: Any, where: str) -> Any:
        """Returns the value that JSON data describes.

        Args:
            data: The data.
            kind: The annotation that the value must match.
            where: The place in the manifest, for errors.

        Raises:
            PackageError: The data does not match.
        """
        if kind is Any:
            return self._read_constant(data, where)
        if kind is type:
            return self._read_class(data, where)
        if _is_union(kind):
            return self._read_one_of(data, typing.get_args(kind), where)
        if dataclasses.is_dataclass(kind):
            return self._read_record(data, kind, where)
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin is tuple and arguments[-1] is not Ellipsis:
            items = _expect(data, list, where)
            if len(items) != len(arguments):
                raise _mismatch(where, f"{len(arguments)} items", data)
            return tuple(
                self.read(item, of, f"{where}[{n}]")
                for n, (item, of) in enumerate(zip(items, arguments, strict=True))
            )
        if origin in (tuple, frozenset):
            items = _expect(data, list, where)
            return origin(self.read(item, arguments[0], f"{where}[{n}]") for n, item in enumerate(items))
        return _read_scalar(data, kind, where)

    def _read_one_of(self, data: Any, kinds: tuple[Any, ...], where: str) -> Any:
        if isinstance(data, dict):
            records = {kind.__name__: kind for kind in kinds if _is_record(kind)}
            chosen = _look_up(data.get(_KIND), records, "a record", f"{where}.{_KIND}")
            rest = {name: value for name, value in data.items() if name != _KIND}
            return self._read_record(rest, chosen, where)
        for kind in kinds:
            if not dataclasses.is_dataclass(kind) and _is_of_json(data, kind):
                return self.read(data, kind, where)
        raise _mismatch(where, " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds), data)

    def _read_record(self, data: Any, cls: Any, where: str) -> Any:
        found, hints = _expect(data, dict, where), _fields_of(cls)
        if found.keys() != hints.keys():
            raise _mismatch(where, f"a {cls.__name__} with {', '.join(hints)}", sorted(map(str, found)))
        return cls(**{name: self.read(found[name], kind, f"{where}.{name}") for name, kind in hints.items()})

    def _read_class(self, data: Any, where: str) -> type:
        return _look_up(data, self.classes, "a class of the package", where)

    def _read_constant(self, data: Any, where: str) -> Any:
        if data is None or isinstance(data, bool | str | int):
            return data
        kind = _expect(data, dict, where).get(_KIND)
        if kind in self.constants:
            return self._read_one_of(data, tuple(self.constants.values()), where)
        readers: dict[str, Callable[[Any], Any]] = {
            "float": lambda value: _read_float(value, where),
            "dtype": lambda value: _look_up(value, _DTYPES, "a dtype", where),
            "device": lambda value: _read_device(value, where),
            "memory_format": lambda value: _look_up(value, _MEMORY_FORMATS, "a memory format", where),
            "layout": lambda value: _look_up(value, _LAYOUTS, "a layout", where),
            "class": lambda value: self._read_class(value, where),
        }
        if kind in readers and data.keys() == {_KIND, "value"}:
            return readers[kind](data["value"])
        containers: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "list": list, "frozenset": frozenset}
        if kind in containers and data.keys() == {_KIND, "items"}:
            items = _expect(data["items"], list, f"{where}.items")
            return containers[kind](
                self._read_constant(item, f"{where}[{n}]") for n, item in enumerate(items)
            )
        raise _mismatch(where, "a constant", data)


# ------------------------------------------------------------------------------------------------- helpers


@functools.cache
def _fields_of(cls: Any) -> dict[str, Any]:
    """Returns the annotations of a record's fields that its constructor takes."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def _is_record(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind)


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _is_of(value: Any, kind: Any) -> bool:
    origin = typing.get_origin(kind) or kind
    return type(value) is origin if isinstance(origin, type) else False


def _is_of_json(data: Any, kind: Any) -> bool:
    origin = typing.get_origin(kind) or kind
    return type(data) is {tuple: list, frozenset: list, type: str}.get(origin, origin)


def _expect(data: Any, kind: type, where: str) -> Any:
    if type(data) is not kind:
        raise _mismatch(where, kind.__name__, data)
    return data


def _look_up(data: Any, table: Mapping[str, Any], what: str, where: str) -> Any:
    if not isinstance(data, str) or data not in table:
        raise _mismatch(where, what, data)
    return table[data]


def _read_scalar(data: Any, kind: Any, where: str) -> Any:
    if kind is torch.dtype:
        return _look_up(data, _DTYPES, "a dtype", where)
    if kind is torch.device:
        return _read_device(data, where)
    return _read_float(data, where) if kind is float else _expect(data, kind, where)


def _read_device(data: Any, where: str) -> torch.device:
    kind, _, index = _expect(data, str, where).partition(":")
    if kind not in ("cpu", "cuda") or not ((index.isdecimal() and len(index) < 4) or not index):
        raise _mismatch(where, "a device", data)
    return torch.device(data)


def _read_float(data: Any, where: str) -> float:
    try:
        number = float(_expect(data, str, where))
    except ValueError:
        raise _mismatch(where, "a float", data) from None
    if repr(number) != data and not math.isnan(number):
        raise _mismatch(where, "a float", data)
    return number


def _mismatch(where: str, expected: str, got: Any) -> PackageError:
    return PackageError(
        f"the manifest of this package does not fit its schema: {where}: expected {expected}, got {got!r:.80}"
    )
