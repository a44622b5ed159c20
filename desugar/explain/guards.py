"""What a call has to meet, and which checks the wrapper does without."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

from desugar.errors import is_library_file
from desugar.explain.records import Guard, LeftOut, Place
from desugar.text import negated

_LEFT_OUT = re.compile(r"^\s*# left out: (.*?): (.*)$")
_OPPOSITE = re.compile(r"^(.*?) (is not|!=) (.*)$")


def describe_guards(wrapper: str, env: Any) -> Iterator[Guard]:
    """The wrapper's checks in their positive form, then what the trace assumed of symbols and on which line."""
    lines = wrapper.splitlines()
    for line, following in itertools.pairwise(lines):
        if following.strip() == "return MISS" and line.strip().startswith("if "):
            yield Guard(positive(line.strip().removeprefix("if ").rstrip(":")))
    seen = set()
    for guard in env.guards:
        text = str(guard.expr)
        if text not in seen:
            seen.add(text)
            yield Guard(text, _place_of(guard))


def positive(condition: str) -> str:
    """What holds when a check passes, from the condition under which it fails."""
    if condition.startswith("not (") and condition.endswith(")"):
        return condition[5:-1]
    if condition.startswith("not "):
        return condition[4:]
    if found := _OPPOSITE.match(condition):
        return f"{found[1]} {'is' if found[2] == 'is not' else '=='} {found[3]}"
    return negated(condition)


def _place_of(guard: Any) -> Place | None:
    """The user's line that asked for something only some sizes meet."""
    stack = getattr(guard, "stack", None)
    frames = stack.summary() if stack is not None else ()
    for frame in reversed(list(frames)):
        if not is_library_file(frame.filename):
            return Place(frame.filename, frame.lineno or 0, (frame.line or "").strip())
    return None


def describe_left_out(text: str) -> Iterator[LeftOut]:
    """The comments about checks that are not there."""
    for number, line in enumerate(text.splitlines()):
        if found := _LEFT_OUT.match(line):
            yield LeftOut(number, found[1], found[2])
