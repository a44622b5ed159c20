"""Formats an explanation as text: titled sections of prose or Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from desugar.explain.fold import Folds, Run, fold_code, fold_lines, fold_program, group_guards
from desugar.explain.records import (
    Guard,
    Leaf,
    Materialized,
    OuterOp,
    Program,
    Report,
    Saved,
    SourceLine,
)

_MOST = 20  # the most fallbacks that a terminal shows
_MOST_GUARDS = 100  # the most guards that a terminal shows


@dataclass(frozen=True, slots=True)
class Section:
    """A title and its text; `language` is "python" or "text"."""

    title: str
    body: str
    language: str = "text"


def render_text(program: Program, *, folded: bool = True) -> str:
    """Returns all sections about one program as text; `folded=False` shows each repeated layer."""
    all_sections = sections(program, folded=folded)
    return "\n\n".join(f"== {section.title} ==\n{section.body}" for section in all_sections) + "\n"


# --------------------------------------------------------------------------------------------- one program


def sections(program: Program, *, folded: bool = True) -> Iterator[Section]:
    """Yields the sections about one program."""
    yield Section(program.title, "\n".join(_overview(program)))
    if program.error:
        yield Section("Not compiled", program.error)
        return
    folds = fold_program(program) if folded else Folds(graphs=((),) * len(program.graphs))
    yield Section("Signature", "\n".join(_signature(program, folds)))
    yield Section("Line by line", "\n".join(_lines(program, folds)) or "It runs no op.")
    yield Section("Aliasing and mutation", "\n".join([*program.aliasing, *program.mutation]) or "None found.")
    for graph, runs in zip(program.graphs, folds.graphs, strict=True):
        needs = f"  (with the attributes {', '.join(graph.needs)} of its module)" if graph.needs else ""
        yield Section(f"The {graph.name} graph{needs}", _code(graph.text, runs, folded), "python")
    if len(program.graphs) > 1:
        yield Section("Saved for the backward", "\n".join(_saved(program, folds)) or "Nothing.")
    yield Section("The wrapper", _code(program.wrapper, folds.wrapper, folded), "python")
    yield Section("A call runs this program if", "\n".join(_guards(program, folded)))


def _code(text: str, runs: Sequence[Run], folded: bool) -> str:
    lines = text.rstrip().splitlines()
    return "\n".join(fold_code(lines, len(lines), runs) if folded else lines)


def _overview(program: Program) -> Iterator[str]:
    yield f"compiled with {program.backend or 'a backend'} in {duration(program.seconds)}: {program.reason}"
    yield from (f"  {guard}" for guard in program.failed)
    if program.stages:
        yield "stages: " + ", ".join(f"{name} {duration(seconds)}" for name, seconds in program.stages)
    if program.cost is not None:
        cost = program.cost
        yield (
            f"a call takes {duration(cost.call)}: the graph {duration(cost.graph)}, "
            f"the wrapper {duration(cost.wrapper)} ({percent(cost.share)})"
        )
    elif program.no_cost:
        yield f"the cost of a call is not measured: {program.no_cost}"
    yield from _other_ways(program)
    for materialized in program.materialized:
        yield f"materialized: {materialized_text(materialized)}"


def _other_ways(program: Program) -> Iterator[str]:
    """Yields the lines about other ways to run the program, if they were timed."""
    worth = program.worth
    if worth is not None:
        ways = [f"{name} {'failed' if t is None else duration(t)}" for name, t in worth.ways]
        answer = f" {worth.answer};" if worth.answer else ""
        yield f"was it worth it:{answer} {', '.join(ways)}; {worth.verdict}"
        if peaks := [f"{name} {bytes_text(nbytes)}" for name, nbytes in worth.memory if nbytes is not None]:
            yield f"peak memory of a call: {', '.join(peaks)}"
        yield from (f"loss: {text}" for text in worth.losses)
    elif program.no_worth:
        yield f"not timed in other ways: {program.no_worth}"


def _signature(program: Program, folds: Folds) -> Iterator[str]:
    yield from _leaves(program.inputs, folds.inputs)
    yield from _leaves(program.captured, folds.captured)
    for symbol in program.symbols:
        yield f"symbol {symbol.name} = {symbol.source} ({symbol.value} here)"
    yield from _leaves(program.outputs, folds.outputs, "→ ")


def _leaves(leaves: Sequence[Leaf], runs: Sequence[Run], arrow: str = "") -> Iterator[str]:
    return fold_lines(lambda n: leaf_lines(leaves[n], arrow=arrow), len(leaves), runs)


def leaf_lines(leaf: Leaf, indent: str = "", arrow: str = "") -> Iterator[str]:
    """Yields a line for a leaf, and one for each of its fields and inner tensors."""
    yield f"{indent}{arrow}{leaf.name}: {leaf_text(leaf)}"
    indent += "    "
    yield from (f"{indent}{name} = {value}  (constant)" for name, value in leaf.metadata)
    yield from (f"{indent}{name} = {value}  (dynamic)" for name, value in leaf.dynamics)
    for inner in leaf.inner:
        yield from leaf_lines(inner, indent, ".")


def leaf_text(leaf: Leaf) -> str:
    """Returns a leaf in a few words."""
    if not leaf.dtype:
        return f"{leaf.kind} {leaf.note}" if leaf.kind in ("int", "constant") else leaf.note
    size = f"[{', '.join(leaf.size)}]"
    grad = " requires_grad" if leaf.requires_grad else ""
    return f"{leaf.kind} {leaf.dtype}{size} on {leaf.device}{grad}"


def _lines(program: Program, folds: Folds) -> Iterator[str]:
    ops = program.ops
    starts = {run.start for run in _every(folds.ops)} | {run.end for run in _every(folds.ops)}

    def show(n: int) -> Iterator[str]:
        op, last = ops[n], next((before.place for before in ops[n - 1 :: -1] if before.parent is None), None)
        if op.parent is None and (n == 0 or op.place != last or n in starts):
            yield source_line_text(op.place)
        yield from _op(op, "    " if op.parent is None else "        ")

    return fold_lines(show, len(ops), folds.ops)


def _every(runs: Iterable[Run]) -> Iterator[Run]:
    for run in runs:
        yield run
        yield from _every(run.inner)


def _op(op: OuterOp, indent: str) -> Iterator[str]:
    how = {"plain": "", "inside": ""}.get(op.kind, f"  by {op.how}")
    yield f"{indent}{op.name}({op.operands}){how}"
    if op.forward:
        yield f"{indent}  → {', '.join(op.forward)}"
    if op.backward:
        yield f"{indent}  backward → {', '.join(op.backward)}"


def _saved(program: Program, folds: Folds) -> Iterator[str]:
    yield from fold_lines(lambda n: iter([_saved_text(program.saved[n])]), len(program.saved), folds.saved)
    sizes = " at the sizes of this call" if program.symbols else ""
    yield f"kept besides inputs and results{sizes}: {bytes_text(program.saved_bytes)}"


def _saved_text(saved: Saved) -> str:
    nbytes = f", {bytes_text(saved.nbytes)}" if saved.nbytes != 0 else ""
    return f"{saved.name}: {saved.dtype}[{', '.join(saved.size)}], {saved.source}{nbytes}"


def _guards(program: Program, folded: bool) -> Iterator[str]:
    if not folded:
        yield from (_guard_text(guard.text, guard) for guard in program.guards)
        return
    checks = sum(guard.checks for guard in program.guards)
    yield f"{count(checks, 'check')} of Dynamo's; names with the most of them first"
    lines = [
        _guard_text(text + (f"  x {group.count}" if group.count > 1 else ""), guard)
        for group in group_guards(program.guards)
        for text, guard in zip(group.texts, group.guards, strict=False)
    ]
    yield from lines[:_MOST_GUARDS]
    if len(lines) > _MOST_GUARDS:
        yield f"{len(lines) - _MOST_GUARDS} more; the page, to_dict and text(folded=False) have them all"


def _guard_text(text: str, guard: Guard) -> str:
    return text + (f"  because of {source_line_text(guard.place)}" if guard.place else "")


# ------------------------------------------------------------------------------------------------ a report


def render_report_text(report: Report) -> str:
    """Formats a report for a terminal: programs, failed compilations, graph breaks, slow paths and fallbacks."""
    lines = [f"{report.title}: {count(len(report.programs), 'program')} in {duration(report.seconds)}"]
    for number, program in enumerate(report.programs, 1):
        calls = "" if program.calls is None else f", {count(program.calls, 'call')}"
        share = f", wrapper {percent(program.cost.share)} of a call" if program.cost else ""
        lines.append(f"{number:>3} {program.title}: {duration(program.seconds)} to compile{calls}{share}")
        lines.append(f"      {program.error or ': '.join([program.reason, *program.failed])}")
        lines += [f"      {text}" for text in _other_ways(program)]
    lines += [f"not compiled: {text}" for text in report.not_compiled]
    lines += [f"graph break: {text}" for text in report.breaks]
    lines += [f"slow: {text}" for text in report.slow]
    often = sorted(report.materialized, key=lambda materialized: -materialized.count)
    lines += [f"materialized: {materialized_text(materialized)}" for materialized in often[:_MOST]]
    if len(often) > _MOST:
        lines.append(f"materialized: {len(often) - _MOST} more; the page has them all")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------- small words


def materialized_text(materialized: Materialized) -> str:
    """Formats one materializing fallback."""
    times = f", {materialized.count} times" if materialized.count > 1 else ""
    when = "" if materialized.traced else " in eager mode"
    return f"{materialized.op} on {materialized.cls}{times}{when}, {source_line_text(materialized.place)}"


def source_line_text(line: SourceLine | None) -> str:
    """Formats a line of the user's code, with its file and number."""
    if line is None:
        return "where no line of yours is on the stack"
    return f"{_short(line.file)}:{line.line}: {line.text}"


def _short(file: str) -> str:
    """Returns the path of a file, relative to the working directory if the file is below it."""
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file


def duration(seconds: float) -> str:
    """Formats seconds in the largest unit that gives at least 1."""
    larger = ((unit, factor) for unit, factor in (("s", 1.0), ("ms", 1e3)) if seconds * factor >= 1)
    unit, factor = next(larger, ("µs", 1e6))
    return f"{seconds * factor:.3g} {unit}"


def percent(share: float) -> str:
    """Formats a fraction as a percentage."""
    return "< 1%" if 0 < share < 0.01 else f"{share:.0%}"


def bytes_text(nbytes: int) -> str:
    """Formats bytes with a unit."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return count(nbytes, "byte")


def count(number: int, noun: str, plural: str = "") -> str:
    """Formats a number and its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"
