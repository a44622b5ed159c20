"""The classes of a package: which have to be known where it is loaded, and whether they are still the same."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from desugar.errors import PackageError
from desugar.packages.manifest.records import ClassRecord
from subclasses import TensorSubclass

# The classes that ship with this library, which a package may name without being given them: name -> module.
_SHIPPED = {
    "PaddedTensor": "subclasses.ragged",
    "JaggedTensor": "subclasses.ragged",
    "Int8Tensor": "subclasses.int8",
    "KeyedJaggedTensor": "subclasses.keyed",
}


def class_name(cls: type) -> str:
    """Returns the name of a class in a manifest."""
    return f"{cls.__module__}.{cls.__qualname__}"


def describe_classes(classes: Iterable[type]) -> dict[type, ClassRecord]:
    """Returns the record of each class; their order is that of their names."""
    unique = sorted(set(classes), key=class_name)
    return {cls: ClassRecord(class_name(cls), fingerprint(cls)) for cls in unique}


def fingerprint(cls: type) -> str:
    """Returns a digest of all that a package relies on in a class: its fields, and how it is taken apart.

    Rules are not part of it. A package holds their results, and calls none of them.
    """
    said: Any = [
        "container",
        [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else [],
    ]
    if issubclass(cls, TensorSubclass):
        spec = cls.__spec__
        inners = [[field.name, field.attribute, field.optional] for field in spec.inners]
        said = ["declared", inners, [f.name for f in spec.statics], [f.name for f in spec.dynamics]]
    elif issubclass(cls, torch.Tensor):
        said = ["handwritten"]
    elif (names := getattr(cls, "_fields", None)) is not None:
        said = ["named tuple", list(names)]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def find_classes(records: Mapping[str, ClassRecord], given: Iterable[type]) -> dict[str, type]:
    """Returns the class of each name in a manifest. Nothing is imported by a name of the file.

    Args:
        records: Name in the manifest -> the class's record.
        given: The classes that the caller knows.

    Raises:
        PackageError: A class is not known, or is another one now.
    """
    known = {class_name(cls): cls for cls in _check_given(given)}
    found = {}
    for key, record in records.items():
        cls = known.get(record.name) or _shipped(record.name) or _of_main(record, known.values())
        if cls is None:
            short = record.name.rpartition(".")[2]
            raise PackageError(
                f"this package takes or returns a {record.name}, which it may not import: pass classes=[{short}]"
            )
        if fingerprint(cls) != record.fingerprint:
            raise PackageError(
                f"{record.name} is declared differently than when this package was saved: save it again"
            )
        found[key] = cls
    return found


def _of_main(record: ClassRecord, given: Iterable[type]) -> type | None:
    """Returns a given class for one that was declared in the script which saved the package."""
    if not record.name.startswith("__main__."):
        return None
    return next((cls for cls in given if cls.__qualname__ == record.name.removeprefix("__main__.")), None)


def _check_given(given: Iterable[type]) -> Iterator[type]:
    for cls in given:
        if not isinstance(cls, type):
            raise TypeError(f"expected classes, got {cls!r:.100}")
        yield cls


def _shipped(name: str) -> type | None:
    for short, module in _SHIPPED.items():
        if name.startswith("subclasses.") and name.rpartition(".")[2] == short:
            cls = getattr(importlib.import_module(module), short)
            return cls if class_name(cls) == name else None
    return None


def classes_in(record: Any) -> Iterator[type]:
    """Yields the classes in a record of a manifest, at any depth."""
    if isinstance(record, type):
        yield record
    elif isinstance(record, tuple | list | frozenset):
        for item in record:
            yield from classes_in(item)
    elif dataclasses.is_dataclass(record):
        for field in dataclasses.fields(record):
            yield from classes_in(getattr(record, field.name))
