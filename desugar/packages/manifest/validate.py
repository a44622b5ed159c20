"""Checks what the types of a manifest do not say, of all that becomes text or a path: names, methods, expressions.

The digest of a manifest finds damage. A number that refers to nothing, in a manifest that somebody wrote, ends in an
error where it is used.
"""

from __future__ import annotations

import functools
import keyword
from collections.abc import Iterable
from typing import Any

from desugar.errors import PackageError
from desugar.ir.values import Wrapper
from desugar.packages.manifest.expressions import Expression, Symbol, check_extent
from desugar.packages.manifest.records import (
    FromLeaf,
    FromSize,
    GraphRecord,
    Manifest,
    Origin,
    OutputsRecord,
    StridedView,
    TensorFacts,
    WrapperLeaf,
)
from desugar.packages.manifest.structure import check_tree


def check_manifest(manifest: Manifest) -> None:
    """Raises `PackageError` for a manifest that describes no programs, or has names that are none."""
    _need(bool(manifest.programs), "it has no programs")
    for weight in manifest.weights:
        _check_parts(weight, 0)
    for program in manifest.programs:
        _need(program.parameters == manifest.programs[0].parameters, "its programs have different parameters")
        _check_parts(program, len(program.symbols))
        for _, tree in program.arguments:
            check_tree(tree, len(program.leaves))
        check_tree(program.result, len(program.results))


def _need(condition: bool, problem: str) -> None:
    if not condition:
        raise PackageError(f"the manifest of this package is damaged: {problem}")


def _check_parts(record: Any, num_symbols: int) -> None:
    for part in _parts(record):
        match part:
            case Symbol() | Expression():
                check_extent(part, num_symbols)
            case TensorFacts():
                numbers = [n for n in (*part.size, *part.stride, part.offset) if isinstance(n, int)]
                _need(all(0 <= n < 2**62 for n in numbers), "a tensor has an impossible size")
            case WrapperLeaf() | Wrapper():
                _check_names(name for name, _ in (*part.inner, *part.dynamics))
            case FromLeaf():
                _check_names(part.path)
            case FromSize() | Origin():
                _check_names(part.path)
                _check_methods([part.method])
            case StridedView():
                _check_names(part.path)
                _check_methods(method for _, method, _ in part.reads)
            case OutputsRecord():
                _check_names(name for _, path, _ in part.versions for name in path)
                _check_names(name for _, name, _ in part.assigns)
            case GraphRecord():
                _need(part.name.replace("_", "").isalnum(), f"{part.name!r} is no name of a graph")


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        is_name = name.isidentifier() and not (keyword.iskeyword(name) or name.startswith("__"))
        _need(is_name, f"{name!r} is no name of an inner tensor")


def _check_methods(methods: Iterable[str]) -> None:
    for method in methods:
        _need(method in ("", "size", "stride"), f"{method!r} is no method of a size")


def _parts(record: Any) -> list[Any]:
    """Returns a record and the records in it, but not those inside of expressions."""
    found, rest = [], [record]
    while rest:
        part = rest.pop()
        if isinstance(part, tuple | list):
            rest.extend(part)
        elif (names := _fields(type(part))) is not None:
            found.append(part)
            rest.extend([getattr(part, name) for name in names])
    return found


@functools.cache
def _fields(cls: type) -> tuple[str, ...] | None:
    """Returns the names of a record's fields; None for what is no record."""
    fields = getattr(cls, "__dataclass_fields__", None)
    return () if cls is Expression else None if fields is None else tuple(fields)
