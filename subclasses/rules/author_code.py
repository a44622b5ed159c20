"""The function inside of wrappers, its package, and the instructions of its code."""

from __future__ import annotations

import dis
import functools
import inspect
import re
import types
from typing import Any, NamedTuple

# Top-level packages whose functions no author wrote.
OF_LIBRARIES = ("torch", "subclasses")


def unwrapped(function: Any) -> Any:
    """Returns the author's function inside of wrappers and of ``functools.partial``."""
    while True:
        function = inspect.unwrap(function) if callable(function) else function
        if not isinstance(function, functools.partial):
            return function
        function = function.func


class Step(NamedTuple):
    """One instruction of bytecode, which reads or writes at most one name.

    Attributes:
        opname: its name in Python 3.11; variants of LOAD_FAST and LOAD_ATTR have these two names.
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
    """Returns the instructions of a code; instructions with a name are the same for each release of Python."""
    steps: list[Step] = []
    for instruction in dis.get_instructions(code):
        opname, name = instruction.opname, instruction.argval
        opnames: list[str] = _PAIR.findall(opname)
        if len(opnames) == 2:  # two instructions in one, since Python 3.13
            steps += [Step(_OPNAMES.get(one, one), n) for one, n in zip(opnames, name, strict=True)]
        elif opname == "LOAD_SUPER_ATTR":  # since Python 3.12 instead of a call of super() and LOAD_ATTR
            if steps[-2].name == "__class__":
                del steps[-2:]  # the arguments of super()
            steps += [Step("CALL", None), Step("LOAD_ATTR", name)]
        elif opname != "EXTENDED_ARG":
            steps.append(Step(_OPNAMES.get(opname, opname), name))
    return steps


def global_names(code: types.CodeType) -> list[str]:
    """Returns the names of the globals that a code reads; ``co_names`` has names of attributes, too."""
    return [step.name for step in steps_of(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")]


def package_of(function: Any) -> str:
    """Returns the name of the top-level package that defines a function or class."""
    return str(getattr(function, "__module__", "")).partition(".")[0]
