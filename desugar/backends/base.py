"""The interface of a backend, and the context in which it compiles one plain graph.

A compiled graph takes one list, which it may clear, and returns a sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from desugar import _torch as torch_private
from desugar.backends.inductor_patches import PendingKernels
from desugar.ir.fx_utils import fake_inputs
from subclasses._torch_tracing import is_compiling_here

CompiledGraph = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class GraphKind:
    """The kind of graph that a backend compiles.

    Attributes:
        role: "inference", "forward" or "backward".
        num_results: The number of leading outputs that are results of the program, not saved tensors.
        static_slots: Positions of the inputs whose address does not change between calls.
    """

    role: str
    num_results: int
    static_slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Backend:
    """A compiler of plain graphs.

    Attributes:
        name: The name that the user passes.
        decompositions: Returns the decomposition table for tracing.
        partitioner: Partitions a joint graph.
        compile_graph: Compiles one graph.
        reads_memory: Whether compiled graphs read the memory of their inputs directly. PyTorch's own kernels handle
            lazy negation and vmap's batches; such graphs do not.
        settings: A context manager with the compiler's settings in force; None if its graphs are not to be stored.
        postpone: A context manager in which a graph is compiled without waiting for its kernels;
            :meth:`PendingKernels.finish` waits for them.
    """

    name: str
    decompositions: Callable[[], Mapping[Any, Any]]
    partitioner: Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
    compile_graph: Callable[[fx.GraphModule, list[Any], GraphKind], CompiledGraph]
    reads_memory: bool = True
    settings: Callable[[], contextlib.AbstractContextManager[None]] | None = None
    postpone: Callable[[fx.GraphModule], contextlib.AbstractContextManager[PendingKernels]] = lambda graph: (
        contextlib.nullcontext(PendingKernels())
    )

    def compile(
        self, graph: fx.GraphModule, kind: GraphKind, fake_mode: Any
    ) -> tuple[CompiledGraph, list[Any] | None]:
        """Compiles a plain graph, in the context that Inductor expects.

        Returns:
            The compiled graph, and the strides of its outputs; None if the backend reports no strides.
        """
        context = torch_private.TracingContext(fake_mode)
        # Makes Inductor report strides as expressions over the trace's symbols, not as the first call's numbers.
        context.fakify_first_call = True
        with torch_private.tracing(context), compiling(fake_mode), context.report_output_strides() as strides:
            compiled = self.compile_graph(graph, fake_inputs(graph), kind)
        return compiled, strides or None


@contextlib.contextmanager
def compiling(fake_mode: Any) -> Iterator[None]:
    """Sets up a compilation: the trace's fake mode is active; autocast, gradients and compiled autograd are off."""
    with (
        torch_private.V.set_fake_mode(fake_mode),
        torch_private.compiled_autograd._disable(),
        torch_private.DisableAutocast(),
        torch.no_grad(),
    ):
        yield


def run_eagerly(
    graph: fx.GraphModule, inputs: list[Any] | None = None, kind: GraphKind | None = None
) -> CompiledGraph:
    """Returns a callable that runs the graph op by op, below autograd's view tracking, as any compiled graph runs."""
    torch_private.LazyGraphModule.force_recompile(graph)
    forward, below_view_tracking = graph.forward, torch_private.BelowADInplaceOrView

    def run(items: list[Any]) -> Sequence[Any]:
        # Compiled autograd traces this graph into its own graph. The first check is the cheaper one.
        if torch.compiler.is_compiling() and is_compiling_here():
            return forward(*items)
        with below_view_tracking():
            return forward(*items)

    run.runs_eagerly = True  # type: ignore[attr-defined]  # the store keeps the graph then
    return run
