"""Attributes set on a value that no compiled rule would see.

PyTorch keeps any attribute that is set on a tensor, and libraries mark parameters this way. Dynamo guards what the
compiled function itself reads. The rules of a class are different: under a compiler they run on values made of fields
alone, so a rule finds such an attribute in eager mode and misses it in compiled code. Setting one that a rule reads
therefore warns, once for each class and name.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from subclasses.rules.registry import all_rules, describe

# A local variable, or one of an enclosing function.
_LOAD_VARIABLE = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE")
# Methods that run where rules run.
_METHODS = ("materialize", "wrap_cotangent")


class UnseenNames:
    """The names of attributes that rules of a class read and that are no fields, with one rule for each.

    ``name in names`` is what generated ``__setattr__`` asks. The rules are searched at the first question.
    """

    def __init__(self, cls: type) -> None:
        self._cls = cls
        self._readers: dict[str, Callable[..., Any]] | None = None

    def clear(self) -> None:
        """Forgets the rules that were searched, after a new one was registered."""
        self._readers = None

    def __contains__(self, name: str) -> bool:
        if name.startswith("_"):  # torch and libraries set such names for themselves
            return False
        if self._readers is None:
            self._readers = dict(self._search())
        return name in self._readers

    def _search(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        own = [getattr(self._cls, name, None) for name in _METHODS]
        for function in (*(rule for _, rule in all_rules(self._cls)), *own):
            for name in _names_read(function):
                # Assigning to a property or a constant is up to its setter.
                has_setter = hasattr(type(inspect.getattr_static(self._cls, name, None)), "__set__")
                if not (hasattr(Tensor, name) or has_setter):
                    yield name, function  # type: ignore[misc]

    def warn(self, name: str) -> None:
        """Warns that a compiler does not see an attribute, and stays quiet about it from then on.

        What torch sets on a value for itself is no attribute of the author's.
        """
        assert self._readers is not None, "only a name that was found is warned of"
        setter = sys._getframe(2).f_globals.get("__name__", "")
        if setter.partition(".")[0] == "torch":
            return
        reader, cls = self._readers.pop(name), self._cls.__name__
        warnings.warn(
            f"{cls}.{name} is no field, and {describe(reader)} reads an attribute of this name: in a compiled function "
            f"rules see values made from fields alone, without it. Declare `{name}` with static(default=...) and pass "
            f"it to the constructor, {cls}(..., {name}=...)",
            stacklevel=3,
        )


def _names_read(function: Any) -> Iterator[str]:
    """Yields the names of attributes that a function reads of its variables, by a dot or with ``getattr``.

    Any other name in its code may belong to a module, such as ``torch.constant``, or to a result of a call.
    """
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    pending = [code] if isinstance(code, types.CodeType) else []
    while pending:
        code = pending.pop()
        instructions = list(dis.get_instructions(code))
        for variable, read in itertools.pairwise(instructions):
            if variable.opname in _LOAD_VARIABLE and read.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                yield str(read.argval)
        if "getattr" in code.co_names:
            yield from (c for c in code.co_consts if isinstance(c, str))
        pending += [c for c in code.co_consts if isinstance(c, types.CodeType)]
