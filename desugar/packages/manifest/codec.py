"""Writes records as JSON, by the types of their fields.

The schema is closed: it is the annotations of the records. A record is an object with exactly the names of its fields,
and, where a field takes records of several classes, the name of its class (:mod:`desugar.packages.manifest.reading`).
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any

import torch

from desugar.errors import PackageError

KIND = "is"  # the name of an object's class


class Writer:
    """Writes records.

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
        if is_union(kind):
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
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {KIND: type(value).__name__, **self._write_record(value)}
        kind = next(of for of in kinds if not dataclasses.is_dataclass(of) and _is_of(value, of))
        return self.write(value, kind)

    def _write_record(self, record: Any) -> dict[str, Any]:
        hints = fields_of(type(record))
        return {name: self.write(getattr(record, name), kind) for name, kind in hints.items()}

    def _write_class(self, cls: type) -> str:
        if cls not in self._names:
            raise PackageError(f"the class {cls.__qualname__} is not known to the package")
        return self._names[cls]

    def _write_constant(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | str) or type(value) is int:
            return value
        if type(value) is float:
            return {KIND: "float", "value": repr(value)}
        if isinstance(value, torch.dtype | torch.device | torch.memory_format | torch.layout):
            return {KIND: type(value).__name__, "value": str(value).removeprefix("torch.")}
        if type(value) in (tuple, list, frozenset):
            items = sorted(value, key=repr) if type(value) is frozenset else value
            return {KIND: type(value).__name__, "items": [self._write_constant(item) for item in items]}
        if isinstance(value, type) and value in self._names:
            return {KIND: "class", "value": self._names[value]}
        if type(value).__name__ in self.constants and dataclasses.is_dataclass(value):
            return {KIND: type(value).__name__, **self._write_record(value)}
        raise PackageError(f"a package cannot hold {value!r:.100} of type {type(value).__qualname__}")


# ------------------------------------------------------------------------------------------------- helpers


@functools.cache
def fields_of(cls: Any) -> dict[str, Any]:
    """Returns the annotations of a record's fields that its constructor takes."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def is_union(kind: Any) -> bool:
    """Returns whether an annotation is a choice of several."""
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _is_of(value: Any, kind: Any) -> bool:
    if kind is type:
        return isinstance(value, type)
    origin = typing.get_origin(kind) or kind
    return type(value) is origin if isinstance(origin, type) else False
