"""Attributes set on a value that no compiled rule would see.

PyTorch keeps any attribute that is set on a tensor, and libraries mark parameters this way. Dynamo guards what the
compiled function itself reads. The rules of a class are different: under a compiler they run on values made of fields
alone, so a rule finds such an attribute in eager mode and misses it in compiled code. Setting one that a rule reads
therefore warns, once for each class and name.
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from subclasses.dispatch.rules import all_rules, describe

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
        if self._readers is None:
            self._readers = dict(self._search())
        return name in self._readers

    def _search(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        own = [getattr(self._cls, name, None) for name in _METHODS]
        for function in (*(rule for _, rule in all_rules(self._cls)), *own):
            for name in _names_read(function):
                # Assigning to a property or a constant is up to its setter.
                has_setter = hasattr(type(inspect.getattr_static(self._cls, name, None)), "__set__")
                if not (name.startswith("_") or hasattr(Tensor, name) or has_setter):
                    yield name, function  # type: ignore[misc]

    def warn(self, name: str) -> None:
        """Warns that a compiler does not see an attribute, and stays quiet about it from then on."""
        assert self._readers is not None, "only a name that was found is warned of"
        reader, cls = self._readers.pop(name), self._cls.__name__
        warnings.warn(
            f"{cls}.{name} is no field, and {describe(reader)} reads an attribute of this name: in a compiled function "
            f"rules see values made from fields alone, without it. Declare `{name}` with static(default=...) and pass "
            f"it to the constructor, {cls}(..., {name}=...)",
            stacklevel=3,
        )


def _names_read(function: Any) -> Iterator[str]:
    """Yields the names of attributes that the code of a function may read, by a dot or with ``getattr``."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    pending = [code] if isinstance(code, types.CodeType) else []
    while pending:
        code = pending.pop()
        yield from code.co_names
        if "getattr" in code.co_names:
            yield from (c for c in code.co_consts if isinstance(c, str))
        pending += [c for c in code.co_consts if isinstance(c, types.CodeType)]
