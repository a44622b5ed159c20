"""Makes the record of one compilation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from desugar.explain.collecting.arguments import describe_inputs, describe_results, describe_symbols
from desugar.explain.collecting.effects import describe_aliasing, describe_mutation, describe_saved
from desugar.explain.collecting.graphs import describe_graph, describe_ops, describe_place, describe_sources
from desugar.explain.collecting.names import Names
from desugar.explain.records import FailedGuard, LeftOut, Materialized, Program
from desugar.recording.listeners import Recording
from desugar.recording.user_names import function_name
from desugar.user_code import Line

_LEFT_OUT = re.compile(r" *# left out: (?P<check>.+?): (?P<proof>.+)")


def collect_program(recording: Recording, backend: str = "") -> Program:
    """Returns the record of a compilation that has just ended, without guards, calls and costs, which come later.

    Args:
        recording: The compilation, whose inputs are still alive.
        backend: The name of the backend that compiled the graphs.
    """
    stages: Counter[str] = Counter()
    for stage, seconds in recording.stages:  # a stage may have run again
        stages[stage] += seconds  # type: ignore[assignment]
    head = {
        "name": function_name(recording.fn, recording.graph),
        "reason": recording.reason,
        "backend": backend,
        "seconds": recording.seconds,
        "failed": (recording.failed,) if recording.failed else (),
        "failures": (FailedGuard.of(recording.failed),) if recording.failed else (),
        "stages": tuple(stages.items()),
        "sources": describe_sources(op.line for op in recording.ops),
    }
    program = recording.program
    if program is None or recording.mode is None:
        return Program(**head, error=str(recording.error or "not finished"))
    names = Names(recording)
    saved = tuple(describe_saved(program, names))
    slots = names.slots()
    graphs = [describe_graph("forward", program.forward, slots)]
    if program.backward is not None:
        sources = {one.name: one.source.removeprefix("input ") for one in saved}
        nodes = program.backward.graph.find_nodes(op="placeholder")
        given = [sources.get(node.name, "a gradient") for node in nodes]
        graphs.append(describe_graph("backward", program.backward, given))
    return Program(
        **head,
        inputs=describe_inputs(names, captured=False),
        captured=describe_inputs(names, captured=True),
        outputs=describe_results(names),
        aliasing=tuple(describe_aliasing(names, recording.args)),
        mutation=tuple(describe_mutation(names)),
        symbols=describe_symbols(names, slots),
        ops=describe_ops(recording.ops, program.joint),
        graphs=tuple(graphs),
        saved=saved,
        saved_bytes=sum(one.nbytes for one in saved),
        wrapper=program.source,
        left_out=describe_left_out(program.source),
        materialized=merge_materialized(recording.materialized, traced=True),
    )


def merge_materialized(
    occurrences: Iterable[tuple[str, str, Line | None]], *, traced: bool
) -> tuple[Materialized, ...]:
    """Returns materializing fallbacks; equal fallbacks of one op on one line are counted together."""
    counts = Counter(occurrences)
    return tuple(
        Materialized(cls, op, describe_place(line), number, traced)
        for (cls, op, line), number in counts.items()
    )


def describe_left_out(text: str) -> tuple[LeftOut, ...]:
    """Returns the omitted checks that the comments of a generated text name, by line."""
    lines = enumerate(map(_LEFT_OUT.match, text.splitlines()))
    return tuple(LeftOut(number, match["check"], match["proof"]) for number, match in lines if match)
