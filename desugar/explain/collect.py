"""From a compilation to its record."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import fx

from desugar import _torch as private
from desugar.explain.effects import describe_aliasing, describe_mutation, describe_saved, describe_shared
from desugar.explain.graphs import describe_graph, describe_ops, describe_place, describe_sources
from desugar.explain.guards import TakenGuards, describe_left_out, take_guards
from desugar.explain.leaves import describe_leaf, describe_symbols, slot_names, with_outer_symbols
from desugar.explain.records import Leaf, Materialized, Program
from desugar.recording.listeners import Recording
from desugar.recording.user_names import function_name
from desugar.user_code import Line, line_of_node


def collect_program(recording: Recording, backend: str = "") -> Program:
    """The record of a compilation that has just ended; what comes after that (guards, calls, costs) is not in it.

    Args:
        recording: The compilation, with its inputs still there.
        backend: The name of what compiled the graphs.
    """
    head = {
        "name": function_name(recording.fn, recording.graph),
        "reason": recording.reason,
        "backend": backend,
        "seconds": recording.seconds,
        "failed": (recording.failed,) if recording.failed else (),
        "stages": tuple(merge_stages(recording.stages)),
    }
    lines = [op.line for op in recording.ops]
    if recording.program is None or recording.inputs is None:
        return Program(**head, error=str(recording.error or "not finished"), sources=describe_sources(lines))
    program, inputs, outputs = recording.program, recording.inputs, recording.traced.outputs
    names = _Names(recording)
    saved = tuple(describe_saved(program.variants, names.of))
    slots = slot_names(inputs, names.inputs)
    graphs = [describe_graph("forward", program.forward, slots)]
    if program.backward is not None:
        sources = {one.name: one.source.removeprefix("input ") for one in saved}
        nodes = program.backward.graph.find_nodes(op="placeholder")
        given = [sources.get(node.name, "a gradient") for node in nodes]
        graphs.append(describe_graph("backward", program.backward, given))
    arguments, captured = names.arguments()
    return Program(
        **head,
        inputs=arguments,
        captured=captured,
        outputs=names.leaves("output", dict(enumerate(outputs.visible)), outputs.items.__getitem__),
        aliasing=(*describe_shared(recording.args, names.of), *describe_aliasing(inputs, outputs, names.of)),
        mutation=tuple(describe_mutation(inputs, outputs, names.of)),
        symbols=describe_symbols(inputs, slots),
        sources=describe_sources(lines),
        ops=describe_ops(recording.ops, program.joint),
        graphs=tuple(graphs),
        saved=saved,
        saved_bytes=sum(one.nbytes for one in saved),
        wrapper=program.source,
        left_out=tuple(describe_left_out(program.source)),
        materialized=merge_materialized(recording.materialized, traced=True),
    )


def guards_of(record: Program, recording: Recording) -> TakenGuards:
    """The guards of a compilation, to be described later."""
    files = [op.line.filename for op in recording.ops if op.line is not None]
    return take_guards(recording, (*record.inputs, *record.captured), files)


# ------------------------------------------------------------------------------------------------------- names

_EXTENT = re.compile(r"\.(size|stride)\(\d+\)$")


class _Names:
    """What the user calls the leaves of arguments and results."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        more = len(recording.inputs.values) - len(recording.program.names)
        self.inputs = [*recording.program.names, *(f"tensor {n} of a rule" for n in range(1, more + 1))]
        count = len(recording.traced.outputs.visible)
        graph = recording.graph if len(recording.program.names) == recording.inputs.num_arguments else None
        self.outputs = _result_names(graph, count)

    def of(self, kind: str, number: int) -> str:
        """The name of an input or result leaf; hidden results have none."""
        names = self.inputs if kind == "input" else self.outputs
        return names[number] if number < len(names) else f"{kind} {number}"

    def arguments(self) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
        """Records of what goes in: through parameters, and through modules, closures, globals and rules.

        Sizes, which Dynamo hands over beside the tensors that have them, are none of either.
        """
        inputs, graph = self.recording.inputs, self.recording.graph
        shown = {n: value for n, value in enumerate(inputs.values) if not _EXTENT.search(self.inputs[n])}
        values = {n: with_outer_symbols(value, inputs) for n, value in shown.items()}
        inside = {n: value for n, value in values.items() if not _is_captured(graph, n, self.inputs[n])}
        outside = {n: value for n, value in values.items() if n not in inside}
        item = inputs.fake_items.__getitem__
        return self.leaves("input", inside, item), self.leaves("input", outside, item)

    def leaves(self, kind: str, values: dict[int, Any], items: Any) -> tuple[Leaf, ...]:
        """Records of some leaves, by number."""
        return tuple(describe_leaf(self.of(kind, n), value, items, self.of) for n, value in values.items())


def _is_captured(graph: fx.GraphModule, number: int, name: str) -> bool:
    """Whether an argument of a graph comes from elsewhere than a parameter, or is a module's."""
    nodes = graph.graph.find_nodes(op="placeholder")
    if number >= len(nodes):
        return not name.startswith("gradient")
    dynamos = private.source_names(graph)[number]
    is_modules = name.startswith("self.") or "._parameters[" in dynamos or "._buffers[" in dynamos
    return is_modules or not private.is_argument(nodes[number])


def _result_names(graph: fx.GraphModule | None, count: int) -> list[str]:
    """Names of the results of a graph of Dynamo's: the variables that the user gave them, where they have one."""
    if count == 1:
        return ["result"]
    names = [f"result {n}" for n in range(1, count + 1)]
    results: Any = () if graph is None else graph.graph.output_node().args[0]
    for n, node in enumerate(results):
        line = line_of_node(node) if isinstance(node, fx.Node) else None
        if n < count and line is not None and re.search(rf"\b{node.name}\b[^=(]*=", line.text):
            names[n] = node.name
    return names


# -------------------------------------------------------------------------------------------------- added up


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
