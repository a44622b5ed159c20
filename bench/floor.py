"""Compares a call with its lower bound: the compiled graph, and one constructor call per result.

*The graph*: the graph that Inductor compiled, called with prepared tensors. *The floor*: the graph, then one
`_make_wrapper_subclass` with constants per result and one store per inner tensor. The rest of a `desugar.compile` call
finds the program: it checks global state, and the arguments' classes, layouts and inner tensors. For comparison, stock
`torch.compile` runs on the inner tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import desugar
from bench.subjects import COUNTS, KINDS, SHAPE, Subject, copy_function, double
from desugar.codegen.build_values import emit_graph_call, emit_value
from subclasses.source_text.build import build_functions
from subclasses.source_text.emitter import Emitter

Call = Callable[[], Any]
FLOOR, PLAIN = "the floor", "plain, torch.compile"


def make_calls(count: int, kind: str = "declared") -> dict[str, Call]:
    """Returns warm inference calls by name."""
    args: list[Any] = [KINDS[kind](torch.rand(SHAPE), torch.rand(SHAPE))[0] for _ in range(count)]
    compiled = desugar.compile(copy_function(double))
    with torch.no_grad():
        for _ in range(3):
            expected = compiled(*args)
    (program,) = compiled.programs
    graph = program.run.__globals__["compiled_graph"]
    items = [inner for x in args for inner in (x.a, x.b)]
    floor = make_floor(program, graph, items)
    for actual, pair in zip(floor(), expected, strict=True):
        torch.testing.assert_close((actual.a, actual.b), (pair.a, pair.b))
    return {
        "the graph": lambda: graph([*items]),
        FLOOR: floor,
        "desugar.compile": lambda: compiled(*args),
        PLAIN: Subject("inference", count, "plain", "torch.compile").build(),
    }


def make_floor(program: desugar.Program, graph: Any, items: list[Any]) -> Call:
    """Generates the part of a wrapper after the arguments are unwrapped: the graph call, and the results."""
    out = Emitter()
    out.reserve("run")
    out.writeline("def run():")
    with out.indent():
        hints = [f"r{n}" for n in range(len(items))]
        results = emit_graph_call(out, graph, f"[*{out.bind(items, 'items')}]", hints, autocast=False)
        leaves = [
            emit_value(out, value, lambda slot: results[slot], f"out{n}")
            for n, value in enumerate(program.outputs)
        ]
        out.writeline(f"return [{', '.join(leaves)}]")
    return build_functions(out.source, out.namespace, filename="<floor>", owner=program)["run"]


def make_all() -> dict[tuple[str, str], Call]:
    """Returns calls by (group, name)."""
    return {
        (f"inference, N = {count}", name): call
        for count in COUNTS
        for name, call in make_calls(count).items()
    }
