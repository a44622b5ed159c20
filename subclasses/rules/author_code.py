"""The code of a rule or method, and of the author's functions that it may call."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import re
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

# Top-level packages whose functions are none of an author's.
OF_LIBRARIES = ("torch", "subclasses")


def unwrapped(function: Any) -> Any:
    """Returns the author's function inside of wrappers and of ``functools.partial``."""
    while True:
        function = inspect.unwrap(function) if callable(function) else function
        if not isinstance(function, functools.partial):
            return function
        function = function.func


def codes_of(function: Any) -> Iterator[types.CodeType]:
    """Yields the code of a function, and of the functions of its package and around it that it may call."""
    pending, met = [function], set()
    while pending:
        function = unwrapped(pending.pop())
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


class Step(NamedTuple):
    """One instruction of bytecode, which reads or writes at most one name.

    Attributes:
        opname: its name in Python 3.11; LOAD_FAST and LOAD_ATTR stand for the variants of these two.
        name: the name or constant.
    """

    opname: str
    name: Any


# The names that releases of Python give to instructions that put the same object on the stack.
_OPNAMES = {
    "LOAD_METHOD": "LOAD_ATTR",
    "LOAD_FAST_CHECK": "LOAD_FAST",
    "LOAD_FAST_BORROW": "LOAD_FAST",
    "LOAD_CLASSDEREF": "LOAD_DEREF",
    "LOAD_FROM_DICT_OR_DEREF": "LOAD_DEREF",
    "LOAD_FROM_DICT_OR_GLOBALS": "LOAD_NAME",
}
_PAIR = re.compile(r"(?:LOAD|STORE)_FAST(?:_BORROW)?")


def steps_of(code: types.CodeType) -> list[Step]:
    """Returns the instructions of a code, the same ones for each release of Python where they name something."""
    steps: list[Step] = []
    for instruction in dis.get_instructions(code):
        opname, name = instruction.opname, instruction.argval
        parts: list[str] = _PAIR.findall(opname)
        if len(parts) == 2:  # two instructions in one, since Python 3.13
            steps += [Step(_OPNAMES.get(part, part), n) for part, n in zip(parts, name, strict=True)]
        elif opname == "LOAD_SUPER_ATTR":  # since Python 3.12 instead of a call of super() and LOAD_ATTR
            if steps[-2].name == "__class__":
                del steps[-2:]  # the arguments of super()
            steps += [Step("CALL", None), Step("LOAD_ATTR", name)]
        elif opname != "EXTENDED_ARG":
            steps.append(Step(_OPNAMES.get(opname, opname), name))
    return steps


def global_names(code: types.CodeType) -> list[str]:
    """Returns the names of what a code reads from its module; ``co_names`` has those of attributes, too."""
    return [step.name for step in steps_of(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")]


def package_of(function: Any) -> str:
    """Returns the name of the top-level package that something was defined in."""
    return str(getattr(function, "__module__", "")).partition(".")[0]


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)
