"""From a compilation to its record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import fx

from desugar.explain.effects import describe_aliasing, describe_mutation, describe_saved
from desugar.explain.graphs import describe_graph, describe_ops, describe_place, describe_sources
from desugar.explain.guards import describe_guards, describe_left_out
from desugar.explain.leaves import (
    argument_names,
    captured_names,
    describe_leaf,
    describe_symbols,
    with_outer_symbols,
)
from desugar.explain.records import Cost, Leaf, Materialized, Program
from desugar.listening import Line, Recording


def collect_program(recording: Recording, backend: str = "", cost: Cost | str = "") -> Program:
    """The record of a compilation that has just ended; `recording` is not needed afterwards.

    Args:
        recording: The compilation, with its inputs still there.
        backend: The name of what compiled the graphs.
        cost: What was measured, or why nothing was.
    """
    stages = tuple(merge_stages(recording.stages))
    head = {
        "name": _program_name(recording),
        "reason": recording.reason,
        "backend": backend,
        "seconds": recording.seconds,
        "stages": stages,
        "cost": cost if isinstance(cost, Cost) else None,
        "no_cost": cost if isinstance(cost, str) else "",
    }
    lines = [op.line for op in recording.ops]
    if recording.program is None or recording.inputs is None:
        return Program(**head, error=str(recording.error or "not finished"), sources=describe_sources(lines))
    program, inputs, outputs = recording.program, recording.inputs, recording.traced.outputs
    names = _Names(recording)
    saved = tuple(describe_saved(program.family, names.of))
    ops = describe_ops(recording.ops, program.joint)
    graphs = [describe_graph("forward", program.forward)]
    if program.backward is not None:
        graphs.append(describe_graph("backward", program.backward))
    return Program(
        **head,
        guards=tuple(describe_guards(program.wrapper, inputs.fakes.env)),
        inputs=names.arguments(inputs, 0, inputs.num_arguments),
        captured=names.arguments(inputs, inputs.num_arguments, len(inputs.values)),
        outputs=names.leaves("output", outputs.visible, outputs.items.__getitem__),
        aliasing=tuple(describe_aliasing(inputs, outputs, names.of)),
        mutation=tuple(describe_mutation(inputs, outputs, names.of)),
        symbols=describe_symbols(inputs, names.of),
        sources=describe_sources(lines),
        ops=ops,
        graphs=tuple(graphs),
        saved=saved,
        saved_bytes=sum(one.nbytes for one in saved),
        wrapper=program.source,
        left_out=tuple(describe_left_out(program.source)),
        materialized=merge_materialized(recording.materialized, traced=True),
    )


class _Names:
    """What the user calls the leaves of arguments and results."""

    def __init__(self, recording: Recording) -> None:
        inputs = recording.inputs
        arguments = argument_names(recording.fn, recording.args, recording.kwargs)
        self.inputs = [*arguments, *captured_names(recording.fn, inputs.captured)]
        outputs = recording.traced.outputs
        self.outputs = _result_names(outputs)

    def of(self, kind: str, number: int) -> str:
        """The name of an input or result leaf; hidden results have none."""
        names = self.inputs if kind == "input" else self.outputs
        return names[number] if number < len(names) else f"{kind} {number}"

    def arguments(self, inputs: Any, start: int, end: int) -> tuple[Leaf, ...]:
        """Records of some arguments."""
        values = [with_outer_symbols(value, inputs) for value in inputs.values[start:end]]
        return self.leaves("input", values, inputs.fake_items.__getitem__, start)

    def leaves(self, kind: str, values: Any, items: Any, start: int = 0) -> tuple[Leaf, ...]:
        """Records of some leaves."""
        return tuple(
            describe_leaf(self.of(kind, start + n), value, items, self.of) for n, value in enumerate(values)
        )


def _result_names(outputs: Any) -> list[str]:
    paths = outputs.treespec.paths()
    return ["result" + "".join(f"[{entry!r}]" for entry in path) for path in paths]


def _program_name(recording: Recording) -> str:
    """The function's name; for a graph of Dynamo's, that of the function it was made from."""
    if isinstance(recording.fn, fx.GraphModule):
        return next((op.line.function for op in recording.ops if op.line is not None), "a graph")
    return function_name(recording.fn)


def function_name(fn: Any) -> str:
    """What to call a function or module."""
    name = getattr(fn, "__qualname__", None) or type(fn).__name__
    return name.replace("<locals>.", "")


def merge_stages(stages: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Stages that ran again, added up."""
    merged: dict[str, float] = {}
    for name, seconds in stages:
        merged[name] = merged.get(name, 0.0) + seconds
    return list(merged.items())


def merge_materialized(
    found: Iterable[tuple[str, str, Line | None]], *, traced: bool
) -> tuple[Materialized, ...]:
    """Materializing fallbacks, those of one op on one line counted together."""
    counts = Counter(found)
    return tuple(
        Materialized(cls, op, describe_place(line), number, traced)
        for (cls, op, line), number in counts.items()
    )
