"""The difference of two reports as text: a line for each change, `-` before what is gone, `+` before what came."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from desugar.explain.diff import Change, ProgramDiff, ReportDiff
from desugar.explain.fold import join_names, without_index
from desugar.explain.text import duration

_MOST = 40  # lines of one kind of change
_NOISE = 1.1  # times that differ by less are not worth a line
_LEAST = 3  # lines that differ in an index and are folded


def render_diff(found: ReportDiff) -> str:
    """Everything that differs."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: ReportDiff) -> Iterator[str]:
    yield f"{found.before} -> {found.after}"
    yield from (f"  {name}: {before} -> {after}" for name, before, after in found.values)
    yield from (f"- {label}" for label in found.removed)
    yield from (f"+ {label}" for label in found.added)
    for program in found.programs:
        lines = list(_program(program))
        if lines:
            yield f"  {program.label}"
            yield from lines
    for change in found.changes:
        yield from _change(change, "  ")
    same = sum(not program.differs for program in found.programs)
    number = len(found.programs)
    yield (
        f"{same} of {number} programs in both are the same, apart from times"
        if number
        else "no program in both"
    )


def _program(program: ProgramDiff) -> Iterator[str]:
    for name, before, after in program.values:
        yield f"    {name}: {before} -> {after}"
    for change in program.changes:
        yield from _change(change, "    ")
    for name, before, after in program.seconds:
        yield from _seconds(name, before, after)


def _seconds(name: str, before: float | None, after: float | None) -> Iterator[str]:
    if before is None or after is None:
        old, new = ("not measured" if value is None else duration(value) for value in (before, after))
        yield f"    {name}: {old} -> {new}"
        return
    low, high = sorted((before, after))
    if high > low * _NOISE:
        ratio = (
            f"{high / low:.2g} times " + ("slower" if after > before else "faster") if low else "from nothing"
        )
        yield f"    {name}: {duration(before)} -> {duration(after)}, {ratio}"


def _change(change: Change, indent: str) -> Iterator[str]:
    yield f"{indent}{change.what}:"
    lines = [*_signed("-", change.removed), *_signed("+", change.added)]
    yield from (f"{indent}  {line}" for line in lines[:_MOST])
    if len(lines) > _MOST:
        yield f"{indent}  {len(lines) - _MOST} more"


def _signed(sign: str, lines: Sequence[tuple[str, int]]) -> Iterator[str]:
    """The lines, those of repeated layers folded."""
    alike: dict[tuple[str, int], list[str]] = {}
    for line, number in lines:
        alike.setdefault((without_index(line), number), []).append(line)
    for (_, number), found in alike.items():
        folded = len(found) >= _LEAST
        for line in [join_names(found)] if folded else found:
            times = number * (len(found) if folded else 1)
            yield f"{sign} {line}" + (f"  x {times}" if times > 1 else "")
