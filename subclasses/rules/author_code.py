"""The code of a rule or method, and of the author's functions that it may call."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

# Top-level packages whose functions are none of an author's.
OF_LIBRARIES = ("torch", "subclasses")


def codes_of(function: Any) -> Iterator[types.CodeType]:
    """Yields the code of a function, and of the functions of its package and around it that it may call."""
    pending, met = [function], set()
    while pending:
        function = pending.pop()
        while isinstance(function, functools.partial):
            function = function.func
        function = inspect.unwrap(function) if callable(function) else function
        if not isinstance(function, types.FunctionType) or function.__code__ in met:
            continue
        met.add(function.__code__)
        package = package_of(function)
        if package in OF_LIBRARIES:
            continue
        called = []
        for code in _nested(function.__code__):
            yield code
            called += [function.__globals__.get(name) for name in code.co_names]
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is empty
                called.append(cell.cell_contents)
        pending += [other for other in called if package_of(other) == package]


def global_names(code: types.CodeType) -> list[str]:
    """Returns the names of what a code reads from its module; ``co_names`` has those of attributes, too."""
    return [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]


def package_of(function: Any) -> str:
    """Returns the name of the top-level package that something was defined in."""
    return str(getattr(function, "__module__", "")).partition(".")[0]


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)
