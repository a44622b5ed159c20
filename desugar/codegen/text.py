"""Small pieces of generated text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_OPERAND = r"[\w.]+(?:\([\w., ]*\))?"
_SIMPLE = re.compile(rf"({_OPERAND}) (is|==) ([\w.]+|'\w*'|\"\w*\")")
_NOT = re.compile(rf"not ({_OPERAND})")
_CALL = re.compile(_OPERAND)


def tuple_of(items: Iterable[object]) -> str:
    """A tuple display."""
    texts = [str(item) for item in items]
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"


def targets_of(names: Iterable[str]) -> str:
    """The left side of an assignment that takes a sequence apart."""
    texts = list(names)
    return f"({texts[0]},)" if len(texts) == 1 else ", ".join(texts)


def negated(condition: str) -> str:
    """The opposite of a condition, as a person would write it."""
    if simple := _SIMPLE.fullmatch(condition):
        left, operator, right = simple.groups()
        return f"{left} {'is not' if operator == 'is' else '!='} {right}"
    if bare := _NOT.fullmatch(condition):
        return bare.group(1)
    return f"not {condition}" if _CALL.fullmatch(condition) else f"not ({condition})"


def join_saved(arguments: Sequence[str], count: int) -> list[str]:
    """Saved tensors that come one after the other, as one slice: `saved[0], saved[1], saved[2]` is `*saved[:3]`.

    Args:
        arguments: Expressions; those read from `saved` as they are are `saved[<place>]`.
        count: How many are saved. All of them together are `*saved`.
    """
    joined: list[str] = []
    places = {f"saved[{place}]": place for place in range(count)}
    start = 0
    while start < len(arguments):
        first = places.get(arguments[start])
        stop = start + 1
        while first is not None and arguments[stop : stop + 1] == [f"saved[{first + stop - start}]"]:
            stop += 1
        if first is None or stop - start < 3:
            joined += arguments[start:stop]
        else:
            span = f"{first or ''}:{first + stop - start}"
            joined.append("*saved" if stop - start == count else f"*saved[{span}]")
        start = stop
    return joined
