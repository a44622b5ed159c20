"""Formats a comparison as text: a table of the ways, details of its cells, and the conditions of the measurement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from desugar.compare.records import Comparison, Way
from desugar.compare.ways import EAGER, OURS, stock_backend, tuned_settings
from desugar.compare.worth import find_losses
from desugar.explain.text import bytes_text, count, duration

Table = list[tuple[str, ...]]  # the first row is the header
_MOST = 5  # recompiles and graph breaks of a way that are listed


def render(comparison: Comparison) -> str:
    """Returns the whole comparison as text, for a file or a pipe."""
    return "\n".join([align(table_of(comparison)), *details(comparison), "", *conditions(comparison), ""])


def align(table: Table) -> str:
    """Aligns the columns of a table, two spaces apart: the first column to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if number < 1 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    )
    return "\n".join(line.rstrip() for line in lines)


# -------------------------------------------------------------------------------------------------- the table


def table_of(comparison: Comparison) -> Table:
    """Returns the table of the ways."""
    call = "a step" if comparison.request.train else "a call"
    header = ("", "result", "1st call", call, "/ eager", "memory", "graphs", "breaks")
    return [header, *map(_row, comparison.ways)]


def _row(way: Way) -> tuple[str, ...]:
    is_compiled = way.name != EAGER
    return (
        way.name,
        way.verdict.state,
        "" if way.first_call is None else duration(way.first_call),
        "" if way.call is None else duration(way.call.median),
        _ratio(way),
        "" if way.memory is None else bytes_text(way.memory),
        str(way.programs.graphs) if is_compiled else "",
        str(len(way.programs.breaks)) if is_compiled else "",
    )


def _ratio(way: Way) -> str:
    """Returns the ratio to eager mode with its spread; 1 for eager mode."""
    if way.ratio is None or way.name == EAGER:
        return "" if way.ratio is None else "1"
    return f"{way.ratio.median:.2f} ± {way.ratio.spread:.2f}"


# ------------------------------------------------------------------------------------------- below the table


def details(comparison: Comparison) -> Iterator[str]:
    """Yields the details of the cells, by way: differences, errors, recompiles and graph breaks."""
    request = comparison.request
    rivals = [way for way in comparison.ways if way.name not in OURS]
    for way in comparison.ways:
        lines = list(_details_of(way))
        if way.name in OURS:
            losses = find_losses([*rivals, way], request.train, request.backend, {})
            lines += [f"loss: {text}" for text in losses]
        if lines:
            yield from ["", f"{way.name}:", *(f"  {line}" for line in lines)]


def _details_of(way: Way) -> Iterator[str]:
    if way.verdict.detail:
        yield f"{way.verdict.state}: {way.verdict.detail}"
    yield from _first("recompiled", way.programs.recompiles)
    yield from _first("graph break", way.programs.breaks)
    yield from _first("note", way.programs.notes)


def _first(what: str, notes: Sequence[str]) -> Iterator[str]:
    for text in notes[:_MOST]:
        yield f"{what}: {text}"
    if len(notes) > _MOST:
        yield f"{what}: {len(notes) - _MOST} more, which --json has"


def conditions(comparison: Comparison) -> list[str]:
    """Returns the conditions of the measurement, and the machine."""
    request = comparison.request
    compared = count(comparison.calls, "training step" if request.train else "call")
    modes = " under no_grad" if request.no_grad else ""
    step = "a step" if request.train else "a call"
    turns = count(comparison.rounds, "round")
    settings = ", ".join(f"{name}={value!r}" for name, value in tuned_settings(request.backend).items())
    return [
        f"result: of {compared}{modes} with new arguments, compared with eager mode:",
        "    values, types, shared memory, arguments and state afterwards, gradients",
        "1st call: in a new process with empty caches, imports not counted",
        f"{step}: the median of {turns} in turns; / eager: in the same round ± spread",
        "memory: the peak of a warm call's allocations",
        f"stock, tuned: torch.compile({settings})",
        f"compiler: {stock_backend(request.backend)} in torch.compile, {request.backend} in ours",
        ", ".join(f"{name} {value}" for name, value in comparison.machine),
    ]
