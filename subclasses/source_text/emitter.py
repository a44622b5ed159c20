"""The emitter: lines of Python and the objects that they refer to.

An emitter has no options and makes no decisions. Its caller resolves everything first, so that the emitted text is
straight-line code with names, indices and types baked in. An object that generated code needs is *bound*: it becomes a
global of the generated code under a readable name, and never passes through ``repr``.

    >>> e = Emitter()
    >>> scale = e.bind(2.5, "scale")
    >>> e.writeline("def double(x):")
    >>> with e.indent():
    ...     e.writeline(f"return x * {scale}")
    >>> print(e.source, end="")
    def double(x):
        return x * scale
    >>> e.namespace
    {'scale': 2.5}
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterator
from contextlib import contextmanager

_RESERVED = frozenset(keyword.kwlist) | frozenset(dir(builtins))


class Emitter:
    """Collects lines, tracks the indentation, and allocates unique names."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._depth = 0
        self._names: set[str] = set(_RESERVED)
        self._counts: dict[str, int] = {}  # stem -> the number that its next name tries first
        self._bound: dict[int, str] = {}
        self._namespace: dict[str, object] = {}

    # ---- text ----------------------------------------------------------------------------------------------

    def writeline(self, line: str = "") -> None:
        """Adds one line, or several if the text contains newlines, at the current indentation."""
        for text in line.split("\n"):
            self._lines.append("    " * self._depth + text if text else "")

    @contextmanager
    def indent(self) -> Iterator[None]:
        """Indents the lines written inside the ``with`` by one level."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @property
    def source(self) -> str:
        """The text emitted so far; it ends with a newline unless it is empty."""
        return "\n".join(self._lines) + "\n" if self._lines else ""

    # ---- names ---------------------------------------------------------------------------------------------

    def fresh_name(self, hint: str) -> str:
        """Returns a valid identifier similar to ``hint`` that this emitter has not used, and reserves it."""
        stem = re.sub(r"\W", "_", hint) or "value"
        if stem[0].isdigit():
            stem = f"_{stem}"
        name, count = stem, self._counts.get(stem, 1)
        while name in self._names:
            name, count = f"{stem}_{count}", count + 1
        self._counts[stem] = count
        self._names.add(name)
        return name

    def reserve(self, *names: str) -> None:
        """Excludes names (of parameters, of functions in the text) from :meth:`fresh_name`."""
        self._names.update(names)

    def bind(self, obj: object, hint: str) -> str:
        """Makes ``obj`` a global of the generated code and returns its name, which is the same for each call."""
        known = self._bound.get(id(obj))
        if known is not None:
            return known
        name = self.fresh_name(hint)
        self._bound[id(obj)] = name
        self._namespace[name] = obj  # also keeps obj alive, so that its id is not reused
        return name

    @property
    def namespace(self) -> dict[str, object]:
        """The bound objects by name, which the text needs as globals."""
        return dict(self._namespace)
