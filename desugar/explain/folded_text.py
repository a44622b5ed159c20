"""Lines of items with repeated layers folded into one block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from desugar.explain.repeats import Run

_LONG = 240  # characters of a line; a call of hundreds of arguments is longer
_HEAD, _TAIL = 140, 60


def run_title(run: Run) -> str:
    """`x 36, layers[0] … layers[35]`."""
    return f"x {run.count}" + (f", {run.label}" if run.label else "")


def fold_lines(
    show: Callable[[int], Iterator[str]], end: int, runs: Sequence[Run], start: int = 0
) -> Iterator[str]:
    """The lines of items, those of a run below its title: of the first block alone, behind a bar.

    Args:
        show: The lines of an item.
        end: The first item that is not shown.
        runs: The runs among the items, in order.
        start: The first item.
    """
    for run in runs:
        yield from (line for n in range(start, run.start) for line in show(n))
        yield f"{run_title(run)}; the first of them:"
        for line in fold_lines(show, run.start + run.length, run.inner, run.start):
            yield f"│ {line}"
        start = run.end
    yield from (line for n in range(start, end) for line in show(n))


def fold_code(lines: Sequence[str], end: int, runs: Sequence[Run], start: int = 0) -> Iterator[str]:
    """Lines of code, those of a run between two comments: of the first block alone. Long lines lose their middle."""
    for run in runs:
        yield from map(shorten, lines[start : run.start])
        indent = lines[run.start][: len(lines[run.start]) - len(lines[run.start].lstrip())]
        yield f"{indent}# {run_title(run)}; the first of them: {{"
        yield from fold_code(lines, run.start + run.length, run.inner, run.start)
        yield f"{indent}# }}"
        start = run.end
    yield from map(shorten, lines[start:end])


def shorten(line: str) -> str:
    """A line without its middle if it is long."""
    if len(line) <= _LONG:
        return line
    return f"{line[:_HEAD]} …{len(line) - _HEAD - _TAIL} more characters… {line[-_TAIL:]}"
