"""Runs the stages in order: from a function over fake arguments to graphs, compiled graphs and a runtime wrapper."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from desugar import _torch as torch_private
from desugar.backends.base import Backend, GraphKind, compiling
from desugar.backends.inductor_patches import PendingKernels
from desugar.backward.recompute import CapturedFunction
from desugar.backward.variants import BackwardVariants, expected_tangents
from desugar.flatten.inputs import Inputs
from desugar.ir.fx_utils import copy_graph, replace_floats
from desugar.ir.stages import (
    CompiledGraphs,
    FromForward,
    Outputs,
    PartitionSpec,
    PlainGraphs,
    ProgramSpec,
    Traced,
    autocast_state,
)
from desugar.passes import verify
from desugar.passes.mutations import keep_old_values, store_results
from desugar.passes.partition import partition, restride_saved
from desugar.program import Program
from desugar.recording import listeners
from desugar.recording.graph_text import WRAPPER_FILE, forget_texts, forget_with, graph_texts
from desugar.recording.listeners import stage
from desugar.store.programs import ProgramCache
from desugar.tracing.side_effects import sink_tokens
from desugar.tracing.trace import discover, trace_graph, trace_once
from desugar.tracing.unsupported import OtherStructure, check_same_structure
from desugar.tracing.views import has_unknown_views
from desugar.wrapper.run import emit_program
from subclasses.source_text.build import build_functions

log = logging.getLogger("desugar")

# ------------------------------------------------------------------------------------------------ one program


@torch_private.disable_dynamo  # the call may come from a frame that Dynamo runs; Dynamo would trace the compiler
def build_program(
    function: CapturedFunction,
    inputs: Inputs,
    backend: Backend,
    on_mismatch: Callable[..., Any],
    cache: ProgramCache | None = None,
) -> Program:
    """Traces, checks, partitions, compiles and wraps a function of argument leaves.

    Args:
        function: The function, and how to compile its derivative.
        inputs: Its flattened arguments.
        backend: The compiler of the plain graphs.
        on_mismatch: The function that runs a call that does not match the program. There are three kinds of such calls.
            A mutated tensor shares memory with another tensor, a storage offset that the program uses differs, or a
            DTensor has another global shape.
        cache: Keeps the compiled graphs, in the store or in this process; None if nothing is kept.

    Raises:
        DesugarError: Desugaring does not support the function. The arguments are unchanged.
    """
    known = graph_texts()
    try:
        with torch_private.compile_lock, torch_private.use_lazy_graph_module(True), _trace_modes():
            stored = None if cache is None else _load(cache, function, inputs)
            compiled, kernels = (stored, PendingKernels()) if stored else _compile(function, inputs, backend)
            program = _wrap_program(compiled, function, inputs.mode, backend, on_mismatch, cache)
            program.is_stored = stored is not None
            if stored is None:
                if program.variants is not None:
                    _compile_backward(program.variants, kernels)
                if cache is not None:
                    cache.save(compiled, inputs)
    except BaseException:
        forget_texts(graph_texts() - known)
        raise
    forget_with(program, graph_texts() - known)
    inputs.flat.release()  # the program would otherwise keep the real tensors of the call alive
    if (recording := listeners.current()) is not None:
        recording.program, recording.mode = program, inputs.mode
    return program


def _wrap_program(
    compiled: CompiledGraphs,
    function: CapturedFunction,
    mode: Any,
    backend: Backend,
    on_mismatch: Callable[..., Any],
    cache: ProgramCache | None,
) -> Program:
    """Generates and builds the runtime wrapper of compiled graphs; see :func:`build_program` for the arguments."""
    with stage("wrapper"):
        text, plan = emit_program(compiled, on_mismatch)
    variants = plan and BackwardVariants(compiled, plan, backend, mode, function, cache)
    program = Program(compiled.spec, compiled.graphs, text.source, variants)
    scope = text.namespace if variants is None else text.namespace | {"backwards": variants.table}
    functions = build_functions(text.source, scope, filename=WRAPPER_FILE, owner=program)
    program.run = functions["run"]
    if variants is not None:
        variants.function = functions["Backward"]
    return program


@contextlib.contextmanager
def _trace_modes() -> Iterator[None]:
    """Turns off compiled autograd and inference mode, which fake tensors do not support; gradients stay off.

    Also makes the nested tensor that PyTorch makes once for all its nested tensors: inside a trace it would be made of
    fake tensors. The modes are on while a stored program is loaded, too, since finding its views runs the function.
    """
    with torch_private.compiled_autograd._disable(), contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        torch_private.shared_nested_tensor()
        yield


# ------------------------------------------------------------------------------------------------ compiling


def _compile(
    function: CapturedFunction, inputs: Inputs, backend: Backend
) -> tuple[CompiledGraphs, PendingKernels]:
    """Runs the stages before the runtime wrapper: discover, trace, partition and compile; checks the graphs.

    Returns:
        The program, and the kernels that have to be built before the first call of the forward. The plain graphs of the
        program are copies, because a compiler may change the graph that it gets.
    """
    traced = _trace(function, inputs, backend)
    if backend.reads_memory:
        replace_floats(traced.graph, inputs.mode)
    verify.check_traced(traced, len(inputs.flat.items))
    return (_compile_training if traced.tangents else _compile_inference)(backend, inputs, traced)


def _trace(function: CapturedFunction, inputs: Inputs, backend: Backend) -> Traced:
    """Runs the function once where that is enough, else twice: to discover the structure of its results, then to trace.

    A run may add assumptions about sizes that make a symbol a constant. Then the first run records the symbol, and the
    second run records the constant: the structures differ. Both runs are repeated under the new assumptions.
    """
    if not torch.is_grad_enabled():
        with stage("trace"):
            traced = trace_once(function.call, inputs, backend.decompositions())
        if traced is not None:
            return traced
    while True:
        with stage("discover"):
            outputs = discover(function.call, inputs)
        assumed = len(inputs.mode.shape_env.guards)
        try:
            with stage("trace"):
                return trace_graph(function.call, inputs, outputs, backend.decompositions())
        except OtherStructure:
            if len(inputs.mode.shape_env.guards) == assumed:
                raise


def _load(cache: ProgramCache, function: CapturedFunction, inputs: Inputs) -> CompiledGraphs | None:
    """Returns the stored program, completed with the views that the function takes; None if the store has none."""
    with stage("load"):
        stored = cache.load(inputs)
        if stored is None or not has_unknown_views(stored.spec.outputs):
            return stored
        outputs, stored_interface = discover(function.call, inputs), stored.spec.interface
        check_same_structure(stored_interface.outputs, outputs)
        interface = replace(stored_interface, outputs=stored_interface.outputs.with_views_of(outputs))
        return replace(stored, spec=replace(stored.spec, interface=interface))


def _compile_inference(
    backend: Backend, inputs: Inputs, traced: Traced
) -> tuple[CompiledGraphs, PendingKernels]:
    outputs = traced.outputs
    joint = graph = copy_graph(traced.graph)
    _end_forward(traced.graph, outputs)
    if outputs.stores or outputs.tokens:
        graph = copy_graph(traced.graph)
    described = inputs.spec()
    kind = GraphKind("inference", traced.num_forward, described.static)
    with stage("compile"):
        forward, _ = backend.compile(traced.graph, kind, inputs.mode)
    spec = ProgramSpec(described, traced.interface, None, autocast_state())
    return CompiledGraphs(
        spec, lambda: PlainGraphs(joint, graph, None), forward, tuple(inputs.captured)
    ), PendingKernels()


def _compile_training(
    backend: Backend, inputs: Inputs, traced: Traced
) -> tuple[CompiledGraphs, PendingKernels]:
    mode, described = inputs.mode, inputs.spec()
    joint = copy_graph(traced.graph)
    with compiling(mode), stage("partition"):
        partitioned = partition(traced, inputs.primals(), list(described.static), backend.partitioner)
    verify.check_partitioned(partitioned, traced, len(inputs.flat.items))
    partitioned = keep_old_values(partitioned, traced.outputs.written_slots(inputs.values))
    read_by_backward = {
        source.index for source in partitioned.backward_inputs if isinstance(source, FromForward)
    }
    _end_forward(partitioned.forward, traced.outputs, read_by_backward)
    graph = copy_graph(partitioned.forward)
    kind = GraphKind("forward", traced.num_forward, described.static)
    with stage("compile forward"), backend.postpone(graph) as kernels:
        forward, strides = backend.compile(partitioned.forward, kind, mode)
    if strides is not None:
        restride_saved(partitioned, strides)
    split = PartitionSpec.of(replace(partitioned, forward=graph))
    spec = ProgramSpec(described, traced.interface, split, autocast_state())
    graphs = PlainGraphs(joint, graph, partitioned.backward)
    return CompiledGraphs(spec, lambda: graphs, forward, tuple(inputs.captured)), kernels


def _end_forward(graph: fx.GraphModule, outputs: Outputs, read_by_backward: Collection[int] = ()) -> None:
    """Adds the sinks of effect tokens and the stores into mutated inputs to the graph of a forward."""
    stores = outputs.store_positions
    sink_tokens(graph, outputs.token_positions)
    stored_views = {outputs.positions[slot]: home for slot, home in outputs.stored_views}
    store_results(graph, stores, read_by_backward, stored_views)
    verify.check_stores(graph, stores)


def _compile_backward(variants: BackwardVariants, kernels: PendingKernels) -> None:
    """Compiles the backward for the expected tangents early, where that is useful, and finishes the forward's kernels.

    With symbolic sizes, the backward's assumptions about sizes have to become guards. While a C++ compiler builds the
    forward's kernels, this process would otherwise wait.
    """
    has_symbols = variants.spec.inputs.has_symbols
    if has_symbols or kernels.are_being_built():
        with stage("compile backward"):
            try:
                variants.compile_ahead(expected_tangents(variants.interface))
            except torch_private.InductorError as error:
                if has_symbols:
                    raise
                log.warning("compiling the backward early failed; the first backward retries: %s", error)
    if kernels.waits:
        with stage("build kernels"):
            kernels.finish()
