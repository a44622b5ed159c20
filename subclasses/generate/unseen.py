"""Attributes set on a value that no compiled rule would see.

PyTorch keeps any attribute that is set on a tensor, and libraries mark parameters this way. Dynamo guards what the
compiled function itself reads. Rules and methods of a class are different: under a compiler they run on values made of
fields alone, so they find such an attribute in eager mode and miss it in compiled code. Setting one that they read
therefore warns, once for each class and name.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from subclasses.rules.author_code import OF_LIBRARIES, codes_of, package_of, steps_of
from subclasses.rules.registry import all_rules, describe
from subclasses.spec.statics import find_tensor

# A local variable, or one of an enclosing function.
_LOAD_VARIABLE = ("LOAD_FAST", "LOAD_DEREF")
_OF_EAGER_MODE = ("__repr__", "__str__", "__format__", "__init_subclass__")
# Code with one of these names may read an attribute whose name is a string in it.
_BY_NAME = frozenset({"getattr", "hasattr", "vars", "__dict__"})


class UnseenNames:
    """The names of attributes that rules and methods of a class read and that are no fields, with one reader for each.

    ``name in names`` is what generated ``__setattr__`` asks. They are searched at the first question.
    """

    def __init__(self, cls: type) -> None:
        self._cls = cls
        self._readers: dict[str, Callable[..., Any]] | None = None

    def clear(self) -> None:
        """Forgets the rules that were searched, after a new one was registered."""
        self._readers = None

    def __contains__(self, name: str) -> bool:
        if self._readers is None:
            self._readers = dict(self._search())
        return name in self._readers

    def _search(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        methods = [f for member in _members(self._cls).values() if (f := _function_of(member)) is not None]
        for function in (*(rule for _, rule in all_rules(self._cls)), *methods):
            for name in (name for code in self._codes(function) for name in _names_read(code)):
                # Assigning to a property or a constant is up to its setter.
                has_setter = hasattr(type(inspect.getattr_static(self._cls, name, None)), "__set__")
                if not (hasattr(Tensor, name) or has_setter):
                    yield name, function  # type: ignore[misc]

    def _codes(self, function: Any) -> Iterator[types.CodeType]:
        """Yields the code of a function with that of the functions that it calls and the properties that it reads."""
        members, pending, met = _members(self._cls), [function], set()
        while pending:
            for code in codes_of(pending.pop()):
                if code not in met:
                    met.add(code)
                    yield code
                    getters = (getattr(members.get(name), "fget", None) for name in code.co_names)
                    pending += [getter for getter in getters if getter is not None]

    def warn(self, name: str, value: object) -> None:
        """Warns that a compiler does not see an attribute, and stays quiet about it from then on.

        What torch sets on a value for itself is no attribute of the author's.
        """
        assert self._readers is not None, "only a name that was found is warned of"
        setter = sys._getframe(2).f_globals.get("__name__", "")
        if setter.partition(".")[0] in OF_LIBRARIES:
            return
        reader, cls = self._readers.pop(name), self._cls.__name__
        mend = f"Declare `{name}` with static(default=...) and pass it to the constructor, {cls}(..., {name}=...)"
        if isinstance(value, Tensor):
            mend = (
                f"A tensor is no metadata: compute it each time from the fields, or declare `{name}: Tensor = inner()` "
                f"and pass it to the constructor, {cls}(..., {name})"
            )
        elif _holds_a_tensor(value):
            mend = (
                "It holds a tensor, which is no metadata: compute it each time from the fields, or declare each tensor "
                "in it with inner() and pass it to the constructor"
            )
        warnings.warn(
            f"{cls}.{name} is no field, and {describe(reader)} reads an attribute of this name: in a compiled function "
            f"rules and methods see values made from fields alone, without it. {mend}",
            stacklevel=3,
        )


def _holds_a_tensor(value: object) -> bool:
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(parts, list | tuple | set | frozenset) or parts is not value:
        return any(map(_holds_a_tensor, parts))  # type: ignore[arg-type]
    return find_tensor(value) is not None


def _members(cls: type) -> dict[str, Any]:
    """Returns what the author's classes define, by name, but for what no compiled function calls."""
    bases = [b for b in cls.__mro__ if not issubclass(Tensor, b) and package_of(b) not in OF_LIBRARIES]
    found = {name: member for base in reversed(bases) for name, member in vars(base).items()}
    return {name: member for name, member in found.items() if name not in _OF_EAGER_MODE}


def _function_of(member: Any) -> types.FunctionType | None:
    """Returns the function of a method; the getter of a property is traced by Dynamo, which guards what it reads."""
    function = getattr(member, "__func__", member)
    is_generated = hasattr(function, "__source__")
    return function if isinstance(function, types.FunctionType) and not is_generated else None


def _names_read(code: types.CodeType) -> Iterator[str]:
    """Yields the names of attributes that code reads of its variables: by a dot, by ``getattr``, in ``__dict__``.

    Any other name in its code may belong to a module, such as ``torch.constant``, or to a result of a call.
    """
    for variable, read in itertools.pairwise(steps_of(code)):
        if variable.opname in _LOAD_VARIABLE and read.opname == "LOAD_ATTR":
            yield read.name
    if not _BY_NAME.isdisjoint(code.co_names):
        yield from (c for c in code.co_consts if isinstance(c, str))
