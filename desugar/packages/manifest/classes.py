"""Finds the classes of a package when it is loaded, and checks that their fields have not changed."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from desugar.errors import PackageError
from subclasses import TensorSubclass
from subclasses.errors import full_name

# Classes that ship with this library, which `load` finds without its argument `classes`: name -> module.
_SHIPPED = {
    "PaddedTensor": "subclasses.ragged",
    "JaggedTensor": "subclasses.ragged",
    "Int8Tensor": "subclasses.int8",
    "KeyedJaggedTensor": "subclasses.keyed",
}


def fingerprint(cls: type) -> str:
    """Returns a digest of the parts of a class that a package relies on: its fields, and their kinds.

    Rules are not part of the digest, since a package holds their traced ops and calls no rule.
    """
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    said: Any = [*getattr(cls, "_fields", ()), *(field.name for field in fields)]
    if issubclass(cls, TensorSubclass):
        spec = cls.__spec__
        inners = [[field.name, field.attribute, field.optional] for field in spec.inners]
        said = [inners, [field.name for field in spec.statics], [field.name for field in spec.dynamics]]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def find_classes(fingerprints: Mapping[str, str], given: Iterable[type]) -> dict[str, type]:
    """Returns the class of each name in a manifest. No name of the file is imported.

    Args:
        fingerprints: Name in the manifest -> the class's fingerprint.
        given: The classes that the caller passes.

    Raises:
        PackageError: A class is missing, or its declaration has changed.
        TypeError: A given object is not a class.
    """
    known: dict[str, type] = {}
    for cls in given:
        if not isinstance(cls, type):
            raise TypeError(f"expected classes, got {cls!r:.100}")
        # The script that saved the package may have declared the class.
        known |= {f"__main__.{cls.__qualname__}": cls, full_name(cls): cls}
    found = {}
    for name, digest in fingerprints.items():
        short = name.rpartition(".")[2]
        cls = known.get(name) or _shipped(name, short)  # type: ignore[assignment]
        if cls is None:
            raise PackageError(
                f"this package takes or returns a {name}, which it may not import: pass classes=[{short}]"
            )
        if fingerprint(cls) != digest:
            raise PackageError(
                f"{name} is declared differently than when this package was saved: save it again"
            )
        found[name] = cls
    return found


def _shipped(name: str, short: str) -> type | None:
    if short not in _SHIPPED or not name.startswith("subclasses."):
        return None
    cls = getattr(importlib.import_module(_SHIPPED[short]), short)
    return cls if full_name(cls) == name else None
