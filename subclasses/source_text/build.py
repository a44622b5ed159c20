"""Compiles generated text into functions, with the only ``exec`` of the repository.

The text is registered in :mod:`linecache` under a unique file name, so that tracebacks, debuggers and
:func:`inspect.getsource` show its lines. It is removed when its owner is collected.

The file name also decides how Dynamo treats a call of a generated function in traced code. Dynamo inlines a function
whose file name is in brackets, ``<subclasses Pair>``, and skips one below a directory on its skip list. Skipping costs
a hot runtime wrapper nothing, where ``torch._dynamo.disable`` would cost 0.4 µs a call. Dynamo never compiles a frame
of either kind on its own.
"""

from __future__ import annotations

import itertools
import linecache
import types
import weakref
from typing import Any

from subclasses._torch import skip_frames

_counter = itertools.count(1)


def build_functions(
    source: str, namespace: dict[str, object], *, filename: str, owner: object | None = None
) -> dict[str, Any]:
    """Executes generated text once and returns the functions that it defines at its top level.

    Args:
        source: Python text that consists of function definitions.
        namespace: the globals of the text; it is copied.
        filename: the file name that tracebacks show. A counter makes it unique: ``<subclasses Pair>`` becomes
            ``<subclasses Pair 3>``, ``/dir/wrapper.py`` becomes ``/dir/wrapper.3.py``.
        owner: a weakly referable object. Once it is collected, the text is removed from :mod:`linecache`. Without an
            owner the text stays.

    Returns:
        The functions by name, each with its own lines in ``__source__``.
    """
    filename = _unique(filename)
    code = compile(source, filename, "exec")
    lines = source.splitlines(keepends=True)
    # A modification time of None makes linecache.checkcache keep an entry without a file.
    linecache.cache[filename] = (len(source), None, lines, filename)
    if owner is not None:
        weakref.finalize(owner, linecache.cache.pop, filename, None).atexit = False
    scope: dict[str, Any] = dict(namespace)  # no `__name__`: Dynamo would import the module of that name
    before = set(scope)
    exec(code, scope)  # noqa: S102 - the one exec, on text from our own emitters
    made = {name: value for name, value in scope.items() if name not in before and name != "__builtins__"}
    for value in made.values():
        if isinstance(value, types.FunctionType):
            value.__source__ = _own_lines(value, lines)  # type: ignore[attr-defined]
            skip_frames(value)
    return made


def _unique(filename: str) -> str:
    number = next(_counter)
    if filename.startswith("<") and filename.endswith(">"):
        return f"{filename[:-1]} {number}>"
    stem, dot, suffix = filename.rpartition(".")
    return f"{stem}.{number}.{suffix}" if dot else f"{filename}.{number}"


def _own_lines(function: types.FunctionType, lines: list[str]) -> str:
    """Returns the lines of one function, without comments above it."""
    first = function.__code__.co_firstlineno - 1
    last = first + 1
    while last < len(lines) and (not lines[last].strip() or lines[last][0].isspace()):
        last += 1
    return "".join(lines[first:last]).rstrip("\n") + "\n"
