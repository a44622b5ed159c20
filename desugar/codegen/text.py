"""Formats small pieces of generated text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from subclasses.source_text.emitter import Emitter


@contextlib.contextmanager
def block(out: Emitter, header: str) -> Iterator[None]:
    """Emits the header of a block, such as `if x:`; the lines that are emitted inside the context are indented."""
    out.writeline(header)
    with out.indent():
        yield


def tuple_of(items: Iterable[object]) -> str:
    """Returns a tuple display: `(a, b)`, `(a,)`, `()`."""
    texts = [str(item) for item in items]
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"


def targets_of(names: Iterable[str]) -> str:
    """Returns the left side of an assignment that unpacks a sequence: `a, b` or `(a,)`."""
    texts = list(names)
    return f"({texts[0]},)" if len(texts) == 1 else ", ".join(texts)


def join_saved(arguments: Sequence[str], count: int) -> list[str]:
    """Replaces runs of three or more consecutive saved tensors by slices: `*saved[:3]`.

    Args:
        arguments: Expressions; a saved tensor itself is `saved[<index>]`.
        count: The number of saved tensors. A run of all of them becomes `*saved`.
    """
    joined: list[str] = []
    indices = {f"saved[{index}]": index for index in range(count)}
    start = 0
    while start < len(arguments):
        first = indices.get(arguments[start])
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
