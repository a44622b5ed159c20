"""An explanation as text: titled sections, each lines of prose or Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from desugar.explain.records import Leaf, Materialized, OuterOp, Place, Program, Report

_MOST = 20  # fallbacks that a terminal is shown
_MOST_GUARDS = 100  # and guards; each module and parameter has some


@dataclass(frozen=True, slots=True)
class Section:
    """A title and its text; `language` is "python" or "text"."""

    title: str
    body: str
    language: str = "text"


def render_text(program: Program) -> str:
    """Everything about one program."""
    return "\n\n".join(f"== {section.title} ==\n{section.body}" for section in sections(program)) + "\n"


# --------------------------------------------------------------------------------------------- one program


def sections(program: Program) -> Iterator[Section]:
    """The sections about one program."""
    yield Section(program.name, "\n".join(_overview(program)))
    if program.error:
        yield Section("Not compiled", program.error)
        return
    yield Section("Signature", "\n".join(_signature(program)))
    yield Section("Line by line", "\n".join(_lines(program)) or "It runs no op.")
    yield Section("Aliasing and mutation", "\n".join([*program.aliasing, *program.mutation]) or "None found.")
    for graph in program.graphs:
        needs = f"  (with the attributes {', '.join(graph.needs)} of its module)" if graph.needs else ""
        yield Section(f"The {graph.name} graph{needs}", graph.text.rstrip(), "python")
    if len(program.graphs) > 1:
        yield Section("Saved for the backward", "\n".join(_saved(program)) or "Nothing.")
    yield Section("The wrapper", program.wrapper.rstrip(), "python")
    yield Section("A call runs this program if", "\n".join(_guards(program)))


def _overview(program: Program) -> Iterator[str]:
    yield f"compiled with {program.backend or 'a backend'} in {duration(program.seconds)}: {program.reason}"
    yield from (f"  {guard}" for guard in program.failed)
    if program.stages:
        yield "stages: " + ", ".join(f"{name} {duration(seconds)}" for name, seconds in program.stages)
    if program.cost is not None:
        yield (
            f"a call takes {duration(program.cost.call)}: the graph {duration(program.cost.graph)}, "
            f"the wrapper {duration(program.cost.wrapper)} ({percent(program.cost.share)})"
        )
    elif program.no_cost:
        yield f"the cost of a call is not measured: {program.no_cost}"
    for found in program.materialized:
        yield f"materialized: {materialized_text(found)}"


def _signature(program: Program) -> Iterator[str]:
    for leaf in (*program.inputs, *program.captured):
        yield from leaf_lines(leaf)
    for symbol in program.symbols:
        yield f"symbol {symbol.name} = {symbol.source} ({symbol.value} here)"
    for leaf in program.outputs:
        yield from leaf_lines(leaf, arrow="→ ")


def leaf_lines(leaf: Leaf, indent: str = "", arrow: str = "") -> Iterator[str]:
    """A leaf and what is inside it, one line each."""
    yield f"{indent}{arrow}{leaf.name}: {leaf_text(leaf)}"
    indent += "    "
    yield from (f"{indent}{name} = {value}  (constant)" for name, value in leaf.metadata)
    yield from (f"{indent}{name} = {value}  (dynamic)" for name, value in leaf.dynamics)
    for inner in leaf.inner:
        yield from leaf_lines(inner, indent, ".")


def leaf_text(leaf: Leaf) -> str:
    """A leaf in a few words."""
    if not leaf.dtype:
        return f"{leaf.kind} {leaf.note}" if leaf.kind in ("int", "constant") else leaf.note
    size = f"[{', '.join(leaf.size)}]"
    grad = " requires_grad" if leaf.requires_grad else ""
    return f"{leaf.kind} {leaf.dtype}{size} on {leaf.device}{grad}"


def _lines(program: Program) -> Iterator[str]:
    last = None
    for op in program.ops:
        if op.parent is None and op.place != last:
            last = op.place
            yield place_text(op.place)
        depth = 1 if op.parent is None else 2
        yield from _op(op, "    " * depth)


def _op(op: OuterOp, indent: str) -> Iterator[str]:
    how = {"plain": "", "inside": ""}.get(op.kind, f"  by {op.how}")
    yield f"{indent}{op.name}({op.operands}){how}"
    if op.forward:
        yield f"{indent}  → {', '.join(op.forward)}"
    if op.backward:
        yield f"{indent}  backward → {', '.join(op.backward)}"


def _saved(program: Program) -> Iterator[str]:
    for saved in program.saved:
        size = f"[{', '.join(saved.size)}]"
        kept = f", {bytes_text(saved.nbytes)}" if saved.nbytes != 0 else ""
        yield f"{saved.name}: {saved.dtype}{size}, {saved.source}{kept}"
    sizes = " at the sizes of this call" if program.symbols else ""
    yield f"kept besides inputs and results{sizes}: {bytes_text(program.saved_bytes)}"


def _guards(program: Program) -> Iterator[str]:
    for guard in program.guards[:_MOST_GUARDS]:
        yield guard.text + (f"  because of {place_text(guard.place)}" if guard.place else "")
    if len(program.guards) > _MOST_GUARDS:
        yield f"{len(program.guards) - _MOST_GUARDS} more; the page and to_dict have them all"


# ------------------------------------------------------------------------------------------------ a report


def render_report_text(report: Report) -> str:
    """A report in a terminal's lines: a line per program, then what was materialized."""
    lines = [f"{report.title}: {count(len(report.programs), 'program')} in {duration(report.seconds)}"]
    for number, program in enumerate(report.programs, 1):
        calls = "" if program.calls is None else f", {count(program.calls, 'call')}"
        share = f", wrapper {percent(program.cost.share)} of a call" if program.cost else ""
        lines.append(f"{number:>3} {program.name}: {duration(program.seconds)} to compile{calls}{share}")
        lines.append(f"      {program.error or ': '.join([program.reason, *program.failed])}")
    often = sorted(report.materialized, key=lambda found: -found.count)
    lines += [f"materialized: {materialized_text(found)}" for found in often[:_MOST]]
    if len(often) > _MOST:
        lines.append(f"materialized: {len(often) - _MOST} more; the page has them all")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------- small words


def materialized_text(found: Materialized) -> str:
    """One materializing fallback."""
    times = f", {found.count} times" if found.count > 1 else ""
    when = "" if found.traced else " in eager mode"
    return f"{found.op} on {found.cls}{times}{when}, {place_text(found.place)}"


def place_text(place: Place | None) -> str:
    """A line of the user's code."""
    if place is None:
        return "where no line of yours is on the stack"
    return f"{_short(place.file)}:{place.line}: {place.text}"


def _short(file: str) -> str:
    """A path from the working directory, if it is below it."""
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file


def duration(seconds: float) -> str:
    """Seconds in the largest unit that gives at least 1."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1 or unit == "µs":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError("the last unit takes everything")


def percent(share: float) -> str:
    """A fraction as a percentage."""
    return "< 1%" if 0 < share < 0.01 else f"{share:.0%}"


def bytes_text(nbytes: int) -> str:
    """Bytes with a unit."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return count(nbytes, "byte")


def count(number: int, noun: str, plural: str = "") -> str:
    """A number and its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"
