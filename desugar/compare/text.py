"""A comparison as text: a table of the ways, what is behind its cells, and how it was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from desugar.compare.records import Comparison, Way
from desugar.compare.ways import EAGER, stock_backend, tuned_settings
from desugar.explain.text import count, duration

Table = list[tuple[str, ...]]  # the first row is the header
_MOST = 5  # recompiles and graph breaks of a way that are listed


def render(comparison: Comparison) -> str:
    """Everything, for a file or a pipe."""
    parts = [align(table_of(comparison)), *details(comparison)]
    return "\n".join([*parts, "", *conditions(comparison)]) + "\n"


def align(table: Table) -> str:
    """Lines of columns two spaces apart: the first one to the left, figures to the right."""
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
    """The table of the ways."""
    has_second = any(way.second_start is not None for way in comparison.ways)
    second = ("2nd start",) if has_second else ()
    call = "a step" if comparison.request.train else "a call"
    header = ("", "result", "1st call", *second, call, "/ eager", "memory", "graphs", "breaks")
    return [header, *(_row(way, has_second) for way in comparison.ways)]


def _row(way: Way, has_second: bool) -> tuple[str, ...]:
    is_compiled = way.name != EAGER
    second = (_seconds(way.second_start),) if has_second else ()
    return (
        way.name,
        way.verdict.state,
        _seconds(way.first_call),
        *second,
        "" if way.call is None else duration(way.call.median),
        _ratio(way),
        "" if way.memory is None else memory_text(way.memory),
        str(way.programs.graphs) if is_compiled else "",
        str(len(way.programs.breaks)) if is_compiled else "",
    )


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)


def _ratio(way: Way) -> str:
    """The ratio to eager mode with its spread; eager mode's own is 1."""
    if way.ratio is None or way.name == EAGER:
        return "" if way.ratio is None else "1"
    return f"{way.ratio.median:.2f} ± {way.ratio.spread:.2f}"


def memory_text(nbytes: int) -> str:
    """Bytes of a process in MiB: less than that is noise."""
    return f"{nbytes / 2**20:.0f} MiB"


# ------------------------------------------------------------------------------------------- below the table


def details(comparison: Comparison) -> Iterator[str]:
    """What is behind the cells: differences, errors, recompiles and graph breaks, in paragraphs by way."""
    for way in comparison.ways:
        lines = list(_details_of(way))
        if lines:
            yield ""
            yield f"{way.name}:"
            yield from (f"  {line}" for line in lines)


def _details_of(way: Way) -> Iterator[str]:
    if way.verdict.detail:
        yield f"{way.verdict.state}: {way.verdict.detail}"
    yield from _first("recompiled", way.programs.recompiles)
    yield from _first("graph break", way.programs.breaks)
    yield from _first("not compiled as asked", way.programs.notes)


def _first(what: str, found: Sequence[str]) -> Iterator[str]:
    for text in found[:_MOST]:
        yield f"{what}: {text}"
    if len(found) > _MOST:
        yield f"{what}: {len(found) - _MOST} more, which --json has"


def conditions(comparison: Comparison) -> Iterator[str]:
    """How it was measured, and on what."""
    request = comparison.request
    what = "training steps" if request.train else "calls"
    if request.no_grad:
        what += " under no_grad"
    compared = count(comparison.calls, what[:-1] if comparison.calls == 1 else what, what)
    yield f"result: of {compared} with new arguments, compared with eager mode:"
    yield "    values, types, shared memory, arguments and state afterwards, gradients"
    yield "1st call: in a new process with empty caches, imports not counted"
    if any(way.second_start is not None for way in comparison.ways):
        yield "2nd start: in another process, with the caches that the first one left behind"
    step = "a step" if request.train else "a call"
    yield f"{step}: the median of {count(comparison.rounds, 'round')} in turns; / eager: in the same round ± spread"
    yield "memory: the peak that the first call adds"
    settings = ", ".join(f"{name}={value!r}" for name, value in tuned_settings(request.backend).items())
    yield f"stock, tuned: torch.compile({settings})"
    stock = stock_backend(request.backend)
    is_same = stock == request.backend
    yield (
        f"compiler: {stock}" if is_same else f"compiler: {stock} in torch.compile, {request.backend} in ours"
    )
    yield ", ".join(f"{name} {value}" for name, value in comparison.machine)
