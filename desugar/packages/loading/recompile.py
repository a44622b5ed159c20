"""Compiles the plain graphs of a package on this machine, in place of running its machine code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from desugar import _torch as torch_private
from desugar.backends.base import CompiledGraph, GraphKind, run_eagerly
from desugar.backends.choose import choose_backend
from desugar.ir.fx_utils import copy_graph, output_nodes
from desugar.packages import graph_text
from desugar.packages.manifest.expressions import Extent, to_sympy
from desugar.packages.manifest.records import Fact, GraphRecord, ProgramRecord, TensorFacts

BACKEND = "inductor"  # compiles the plain graphs


def recompiled(texts: Any, program: ProgramRecord) -> Callable[[GraphRecord], CompiledGraph]:
    """Returns the function that compiles the graphs of a program.

    Args:
        texts: Name -> the graph as JSON data.
        program: The program.
    """
    env = torch_private.ShapeEnv(duck_shape=False)
    symbols = [
        torch_private.symbol_between(env, f"s{n}", known.hint, known.low, known.high)
        for n, known in enumerate(program.symbols)
    ]
    hints = dict(zip(symbols, program.hints, strict=True))
    mode = torch_private.FakeTensorMode(shape_env=env)
    for guard in program.guards:
        env.evaluate_expr(to_sympy(guard, symbols))
    num_guards = len(env.guards)

    def number(extent: Extent) -> Any:
        if isinstance(extent, int):
            return extent
        expression = to_sympy(extent, symbols)
        return env.create_symintnode(expression, hint=int(expression.xreplace(hints)))

    def fake(fact: Fact) -> Any:
        if not isinstance(fact, TensorFacts):
            return None if fact is None else number(fact)
        size, stride = (list(map(number, extents)) for extents in (fact.size, fact.stride))
        return torch.empty_strided(size, stride, dtype=fact.dtype, device=fact.device)

    def load(record: GraphRecord) -> CompiledGraph:
        """Compiles a graph; if the compilation adds guards on sizes, the graph runs op by op instead."""
        is_forward = record == program.forward
        items = (one.items for one in program.backwards if one.compiled == record)
        facts = program.spec.inputs.items if is_forward else next(items)
        with mode, torch.no_grad(), env.ignore_fresh_unbacked_symbols(), torch_private.oblivious_sizes():
            graph = graph_text.read(texts[record.name], list(map(fake, facts)))
        role = "backward" if not is_forward else "inference" if program.spec.split is None else "forward"
        kind = GraphKind(role, len(output_nodes(graph)))
        with torch_private.oblivious_sizes():
            compiled, _ = choose_backend(BACKEND).compile(copy_graph(graph), kind, mode)
        return compiled if len(env.guards) == num_guards else run_eagerly(graph)

    return load
