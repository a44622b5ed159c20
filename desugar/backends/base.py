"""What a backend is: four functions, and the graphs that it is given.

A compiled graph is called with one list, which it may empty, and returns a sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from desugar import _torch as private
from desugar.backends.parallel_build import Kernels

CompiledGraph = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class GraphKind:
    """Which graph is compiled.

    Attributes:
        role: "inference", "forward" or "backward".
        num_results: Leading outputs that the user sees.
        static_slots: Inputs whose address does not change between calls.
    """

    role: str
    num_results: int
    static_slots: tuple[int, ...] = ()


def _no_wait(graph: fx.GraphModule) -> contextlib.AbstractContextManager[Kernels]:
    return contextlib.nullcontext(Kernels())


@dataclass(frozen=True, slots=True)
class Backend:
    """How graphs are traced, split and compiled.

    Attributes:
        name: What the user calls it.
        decompositions: Into what ops are taken apart in a trace.
        split: Splits a joint graph.
        compile_graph: Compiles one graph.
        reads_memory: Whether compiled graphs read the memory of their inputs as it is, past PyTorch's own kernels,
            which know of lazy negation.
        postpone: Inside, a graph may be compiled without waiting for its kernels, which :meth:`Kernels.finish` does.
    """

    name: str
    decompositions: Callable[[], Mapping[Any, Any]]
    split: Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
    compile_graph: Callable[[fx.GraphModule, list[Any], GraphKind], CompiledGraph]
    reads_memory: bool = True
    postpone: Callable[[fx.GraphModule], contextlib.AbstractContextManager[Kernels]] = _no_wait


def run_as_is(
    graph: fx.GraphModule, inputs: list[Any] | None = None, kind: GraphKind | None = None
) -> CompiledGraph:
    """The graph itself, called with a list; autograd takes no note of it, as of any compiled graph."""
    private.LazyGraphModule.force_recompile(graph)
    forward, below = graph.forward, private.BelowADInplaceOrView

    def run(items: list[Any]) -> Sequence[Any]:
        if torch.compiler.is_compiling():  # compiled autograd takes the graph into its own
            return forward(*items)
        with below():
            return forward(*items)

    return run
