"""Compiles the plain graphs of a package on this machine, in place of running its machine code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from desugar import _torch as private
from desugar.backends import graphs
from desugar.backends.base import CompiledGraph, GraphKind, run_eagerly
from desugar.backends.choose import choose_backend
from desugar.errors import PackageError
from desugar.ir.fx_utils import copy_graph, output_nodes
from desugar.packages import graph_text
from desugar.packages.manifest.expressions import Extent, to_sympy
from desugar.packages.manifest.records import Fact, GraphRecord, ProgramRecord, TensorFacts

BACKEND = "inductor"  # what compiles them


class RecompiledGraphs:
    """The plain graphs of a package.

    Attributes:
        texts: Name -> the graph as JSON data.
    """

    def __init__(self, texts: Any) -> None:
        if not isinstance(texts, dict):
            raise PackageError("the plain graphs of this package do not fit their schema")
        self.texts: Mapping[str, Any] = texts

    def of(self, program: ProgramRecord) -> Callable[[GraphRecord], CompiledGraph]:
        """Returns the function that compiles the graphs of a program."""

        def load(record: GraphRecord) -> CompiledGraph:
            if record.name not in self.texts:
                raise PackageError(f"this package lacks the plain graph {record.name!r}")
            return _Compilation(program).compile(record, self.texts[record.name])

        return load


class _Compilation:
    """The compilation of one graph: symbols for the sizes of its program, with what is known of them."""

    def __init__(self, program: ProgramRecord) -> None:
        self.program = program
        self.env = private.ShapeEnv(duck_shape=False)
        self.symbols = [
            private.symbol_between(self.env, f"s{n}", known.hint, known.low, known.high)
            for n, known in enumerate(program.symbols)
        ]
        self.mode = private.FakeTensorMode(shape_env=self.env)
        for guard in program.guards:
            self.env.evaluate_expr(to_sympy(guard, self.symbols))
        self.num_guards = len(self.env.guards)

    def compile(self, record: GraphRecord, text: Any) -> CompiledGraph:
        """Compiles a graph; one that assumes more of sizes than its program does runs op by op."""
        is_forward = record == self.program.forward
        facts: Sequence[Fact] = self.program.facts
        if not is_forward:
            facts = next(one.items for one in self.program.backwards if one.graph == record)
        with self.mode, torch.no_grad(), self.env.ignore_fresh_unbacked_symbols(), private.oblivious_sizes():
            graph = graph_text.read(text, [self._fake(fact) for fact in facts])
        role = "backward" if not is_forward else "inference" if self.program.split is None else "forward"
        kind = GraphKind(role, len(output_nodes(graph)))
        backend, copied = choose_backend(BACKEND), copy_graph(graph)
        with private.oblivious_sizes():
            compiled, _ = graphs.compile_graph(backend, copied, kind, self.mode)
        return compiled if len(self.env.guards) == self.num_guards else run_eagerly(graph)

    def _fake(self, fact: Fact) -> Any:
        if not isinstance(fact, TensorFacts):
            return None if fact is None else self._int(fact)
        size, stride = ([self._int(extent) for extent in extents] for extents in (fact.size, fact.stride))
        return torch.empty_strided(size, stride, dtype=fact.dtype, device=fact.device)

    def _int(self, extent: Extent) -> Any:
        if isinstance(extent, int):
            return extent
        expression = to_sympy(extent, self.symbols)
        hints = dict(zip(self.symbols, (symbol.hint for symbol in self.program.symbols), strict=True))
        return self.env.create_symintnode(expression, hint=int(expression.xreplace(hints)))
