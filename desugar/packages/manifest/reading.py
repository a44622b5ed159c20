"""Reads records from JSON data, by the types of their fields: the schema of the manifest.

A reader is made of each annotation once. What is not of the annotated type raises an error that names its place.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from desugar.errors import PackageError
from desugar.packages.manifest.codec import KIND, fields_of, is_union
from subclasses.errors import one_of

Read = Callable[[Any], Any]


def _named(cls: type) -> dict[str, Any]:
    found = (value for value in vars(torch).values() if isinstance(value, cls))
    return {str(value).removeprefix("torch."): value for value in found}


_DTYPES, _MEMORY_FORMATS = _named(torch.dtype), _named(torch.memory_format)
_CONTAINERS: Mapping[str, Callable[[Any], Any]] = {"tuple": tuple, "list": list, "frozenset": frozenset}


class SchemaError(PackageError):
    """Raised for data that does not fit the schema.

    Attributes:
        where: The place in the manifest, from the outside.
    """

    def __init__(self, expected: str, got: Any) -> None:
        self.expected, self.got, self.where = expected, f"{got!r:.80}", ""
        super().__init__()
        self.at("")

    def at(self, place: str) -> SchemaError:
        """Adds the next place outside of the error's, and returns the error."""
        self.where = place + self.where
        problem = f"manifest{self.where}: expected {self.expected}, got {self.got}"
        self.args = (f"the manifest of this package does not fit its schema: {problem}",)
        return self


class Reader:
    """Reads records.

    Attributes:
        constants: Classes of records that may stand where a field takes any constant.
        classes: Name in the manifest -> class.
    """

    def __init__(self, constants: tuple[type, ...], classes: Mapping[str, type]) -> None:
        self.constants, self.classes = constants, classes
        self._readers: dict[Any, Read] = {
            Any: self._read_constant,
            type: _in_table(classes, "a class of the package"),
            torch.dtype: _in_table(_DTYPES, "a dtype"),
            torch.device: _read_device,
            float: _read_float,
            **{kind: _exactly(kind) for kind in (int, str, bool, types.NoneType)},
        }
        self._constant_records: Read | None = None

    def read(self, data: Any, kind: Any) -> Any:
        """Returns the value that JSON data describes.

        Raises:
            PackageError: The data does not match the annotation.
        """
        return self._reader(kind)(data)

    def _reader(self, kind: Any) -> Read:
        if kind not in self._readers:
            self._readers[kind] = lambda data: self._readers[kind](
                data
            )  # a record may hold others of its class
            self._readers[kind] = self._make(kind)
        return self._readers[kind]

    def _make(self, kind: Any) -> Read:
        if is_union(kind):
            return self._union(typing.get_args(kind))
        if dataclasses.is_dataclass(kind):
            return self._record(kind)
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin is tuple and arguments[-1] is not Ellipsis:
            return _fixed(tuple(map(self._reader, arguments)))
        assert origin in (tuple, frozenset), kind
        return _each(origin, self._reader(arguments[0]))

    def _union(self, kinds: tuple[Any, ...]) -> Read:
        classes: list[Any] = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
        records = {cls.__name__: self._record(cls) for cls in classes}
        plain = [kind for kind in kinds if not dataclasses.is_dataclass(kind)]
        by_type = {_json_type(kind): self._reader(kind) for kind in plain}
        expected = " or ".join([*records, *(getattr(kind, "__name__", str(kind)) for kind in plain)])

        def read(data: Any) -> Any:
            if type(data) is dict:
                chosen = data.get(KIND)
                if type(chosen) is not str or chosen not in records:
                    raise SchemaError(expected, chosen).at(f".{KIND}")
                return records[chosen]({name: value for name, value in data.items() if name != KIND})
            if type(data) not in by_type:
                raise SchemaError(expected, data)
            return by_type[type(data)](data)

        return read

    def _record(self, cls: Any) -> Read:
        kinds = fields_of(cls)
        fields: list[tuple[str, Read]] = []

        def read(data: Any) -> Any:
            if not fields:
                fields.extend((name, self._reader(kind)) for name, kind in kinds.items())
            if type(data) is not dict or data.keys() != kinds.keys():
                raise SchemaError(f"{one_of(cls)} with {', '.join(kinds)}", data)
            name = ""
            values = []
            try:
                for name, reader in fields:
                    values.append(reader(data[name]))
            except SchemaError as error:
                raise error.at(f".{name}") from None
            return cls(*values)

        return read

    # .............................................................................................. constants

    def _read_constant(self, data: Any) -> Any:
        if data is None or type(data) in (bool, str, int):
            return data
        if type(data) is not dict:
            raise SchemaError("a constant", data)
        kind: Any = data.get(KIND)
        if any(kind == cls.__name__ for cls in self.constants):
            if self._constant_records is None:
                self._constant_records = self._union(self.constants)
            return self._constant_records(data)
        if data.keys() == {KIND, "items"} and kind in _CONTAINERS:
            return _each(_CONTAINERS[kind], self._read_constant)(data["items"])
        if data.keys() == {KIND, "value"} and kind in _SCALARS:
            return _SCALARS[kind](data["value"])
        if data.keys() == {KIND, "value"} and kind == "class":
            return self._readers[type](data["value"])
        raise SchemaError("a constant", data)


# -------------------------------------------------------------------------------------------------- readers


def _exactly(kind: type) -> Read:
    def read(data: Any) -> Any:
        if type(data) is not kind:
            raise SchemaError(kind.__name__, data)
        return data

    return read


def _in_table(table: Mapping[str, Any], what: str) -> Read:
    def read(data: Any) -> Any:
        if type(data) is not str or data not in table:
            raise SchemaError(what, data)
        return table[data]

    return read


def _fixed(readers: tuple[Read, ...]) -> Read:
    def read(data: Any) -> Any:
        if type(data) is not list or len(data) != len(readers):
            raise SchemaError(f"{len(readers)} items", data)
        try:
            return tuple([reader(item) for reader, item in zip(readers, data, strict=True)])
        except SchemaError:
            _find(readers, data)

    return read


def _each(container: Callable[[Any], Any], reader: Read) -> Read:
    def read(data: Any) -> Any:
        if type(data) is not list:
            raise SchemaError("list", data)
        try:
            return container([reader(item) for item in data])
        except SchemaError:
            _find((reader,) * len(data), data)
        except TypeError as error:  # an item cannot be hashed
            raise SchemaError("constants that can be hashed", data) from error

    return read


def _find(readers: tuple[Read, ...], data: list[Any]) -> NoReturn:
    """Raises the error of the first item that does not fit, with its number."""
    for number, (reader, item) in enumerate(zip(readers, data, strict=True)):
        try:
            reader(item)
        except SchemaError as error:
            raise error.at(f"[{number}]") from None
    raise AssertionError("each item can be read alone")


def _json_type(kind: Any) -> type:
    origin = typing.get_origin(kind) or kind
    return {tuple: list, frozenset: list, type: str}.get(origin, origin)


def _read_device(data: Any) -> torch.device:
    kind, _, index = data.partition(":") if type(data) is str else ("", "", "")
    if kind not in ("cpu", "cuda") or not ((index.isdecimal() and len(index) < 4) or not index):
        raise SchemaError("a device", data)
    return torch.device(data)


def _read_float(data: Any) -> float:
    try:
        number = float(data) if type(data) is str else None
    except ValueError:
        number = None
    if number is None or (repr(number) != data and not math.isnan(number)):
        raise SchemaError("a float", data)
    return number


_SCALARS: Mapping[str, Read] = {
    "float": _read_float,
    "device": _read_device,
    "dtype": _in_table(_DTYPES, "a dtype"),
    "memory_format": _in_table(_MEMORY_FORMATS, "a memory format"),
    "layout": _in_table({"strided": torch.strided}, "a layout"),
}
