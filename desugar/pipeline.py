"""The stages in order: a function over fake arguments becomes graphs, compiled graphs and a wrapper around them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from desugar import _torch as private
from desugar.backends import choose
from desugar.backends.choose import Backend, GraphKind
from desugar.backends.parallel_build import Kernels, expected_tangents
from desugar.frontend.inputs import Inputs
from desugar.ir.fx_utils import copy_graph
from desugar.passes import verify
from desugar.passes.mutations import keep_old_values, store_results
from desugar.passes.partition import FromForward, partition
from desugar.program import Program
from desugar.recording import listeners
from desugar.recording.graph_text import WRAPPER_FILE, forget_texts, forget_with, graph_texts
from desugar.recording.listeners import stage
from desugar.tracing.effect_tokens import sink_tokens
from desugar.tracing.modes import autocast_state, is_autocast
from desugar.tracing.outputs import store_positions, token_positions, written_slots
from desugar.tracing.trace import Traced, discover, trace_graph
from desugar.wrapper.backward_variants import Family
from desugar.wrapper.recompute import Again
from desugar.wrapper.run import Parts, emit_program
from subclasses.codegen.build import build_functions

log = logging.getLogger("desugar")

# ------------------------------------------------------------------------------------------------ one program


@private.disable_dynamo  # a frame of Dynamo's may be running, which would trace the compiler
def build_program(
    again: Again,
    inputs: Inputs,
    leaves: list[Any],
    backend: Backend,
    otherwise: Callable[..., Any] | None = None,
) -> Program:
    """Traces, checks, splits, compiles and wraps a function of flat leaves.

    Args:
        again: The function.
        inputs: Its arguments, taken apart.
        leaves: The argument leaves themselves.
        backend: What compiles the plain graphs.
        otherwise: Takes the calls whose arguments share memory in a way that matters; None if the caller looks.

    Raises:
        DesugarError: For what the pass does not take. Arguments are untouched.
        StaticNeeded: The sizes have to be constants.
    """
    known = graph_texts()
    try:
        with private.compile_lock, private.use_lazy_graph_module(True):
            program = wrap_program(run_stages(again, inputs, backend), inputs, leaves, otherwise)
    except BaseException:
        forget_texts(graph_texts() - known)
        raise
    forget_with(program, graph_texts() - known)
    return program


def run_stages(again: Again, inputs: Inputs, backend: Backend) -> Stages:
    """Everything between the inputs and the wrapper: two runs, the split, the compiler, a check after each."""
    with private.compiled_autograd._disable(), _ordinary_mode():
        private.shared_nested_tensor()
        with stage("discover"):
            outputs = discover(again.call, inputs)
        with stage("trace"):
            traced = trace_graph(again.call, inputs, outputs, backend.decompositions())
        verify.check_traced(traced, len(inputs.flat.items))
        return _compile(backend, inputs, traced, again)


def _ordinary_mode() -> contextlib.AbstractContextManager[Any]:
    """Inference mode is left for the trace (fake tensors know no inference tensors); gradients stay off."""
    if not torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    return stack


def wrap_program(
    stages: Stages, inputs: Inputs, leaves: list[Any], otherwise: Callable[..., Any] | None
) -> Program:
    """The runnable program."""
    parts = Parts(
        inputs=inputs,
        outputs=stages.traced.outputs,
        traced=stages.traced,
        leaves=leaves,
        forward=stages.compiled_forward,
        family=stages.family,
        autocast=is_autocast(autocast_state()),
        otherwise=otherwise,
    )
    with stage("wrapper"):
        text = emit_program(parts)
    program = Program(
        forward=stages.forward,
        backward=stages.family.partitioned.backward if stages.family else None,
        joint=stages.joint,
        inputs=tuple(inputs.values),
        outputs=stages.traced.outputs.visible,
        wrapper=text.source,
        family=stages.family,
        saved_bytes=stages.family.partitioned.saved_bytes if stages.family else 0,
        run=_unbuilt,
        is_dynamic=inputs.has_symbols,
    )
    functions = build_functions(text.source, text.namespace, filename=WRAPPER_FILE, owner=program)
    program.run = functions["run"]
    if stages.family is not None:
        stages.family.function = functions["Backward"]
    if (recording := listeners.current()) is not None:
        recording.program, recording.inputs, recording.traced = program, inputs, stages.traced
    inputs.release_arguments()
    return program


def _unbuilt(*leaves: Any) -> Any:
    raise RuntimeError("the wrapper of this program has not been built")


# ------------------------------------------------------------------------------------------------ compiling


@dataclass(frozen=True, slots=True)
class Stages:
    """What the stages made of a traced function: kept graphs, and the compiled ones."""

    traced: Traced
    joint: fx.GraphModule
    forward: fx.GraphModule
    compiled_forward: choose.CompiledGraph
    family: Family | None = None


def _compile(backend: Backend, inputs: Inputs, traced: Traced, again: Again) -> Stages:
    """Splits (in training) and compiles; the kept graphs are copies, for a compiler may change its own."""
    mode = inputs.fakes.mode
    static = _static_slots(inputs)
    joint = copy_graph(traced.graph)
    stores = store_positions(traced.outputs)
    if not traced.is_training:
        sink_tokens(traced.graph, token_positions(traced.outputs))
        store_results(traced.graph, stores)
        verify.check_stores(traced.graph, stores)
        kind = GraphKind("inference", traced.num_forward, tuple(static))
        with stage("compile"):
            compiled, _ = choose.compile_forward(backend, traced.graph, kind, mode)
        return Stages(traced, joint, joint, compiled)
    with choose.compiling(mode), stage("partition"):
        partitioned = partition(traced, inputs.primals(), static, backend.split)
    verify.check_partitioned(partitioned, traced, len(inputs.flat.items))
    partitioned = keep_old_values(partitioned, written_slots(inputs.values, traced.outputs))
    kept = {source.index for source in partitioned.backward_inputs if isinstance(source, FromForward)}
    sink_tokens(partitioned.forward, token_positions(traced.outputs))
    store_results(partitioned.forward, stores, kept)
    verify.check_stores(partitioned.forward, stores)
    forward = copy_graph(partitioned.forward)
    kind = GraphKind("forward", traced.num_forward, tuple(static))
    with stage("compile forward"), backend.postpone(forward) as kernels:
        compiled, strides = choose.compile_forward(backend, partitioned.forward, kind, mode)
    for position, source in enumerate(partitioned.backward_inputs):
        if strides is not None and isinstance(source, FromForward):
            choose.restride_saved(partitioned.backward, position, strides[source.index])
    family = Family(inputs, traced, replace(partitioned, forward=forward), backend, again)
    _compile_backward(family, kernels)
    return Stages(traced, joint, forward, compiled, family)


def _compile_backward(family: Family, kernels: Kernels) -> None:
    """Compiles the expected backward, for what it assumes of sizes or while the forward's kernels are built."""
    has_symbols = family.inputs.has_symbols
    if has_symbols or kernels.are_being_built():
        with stage("compile backward"):
            try:
                family.compile_ahead(expected_tangents(family.traced))
            except private.InductorError as error:
                if has_symbols:
                    raise
                # Whoever calls it meets the error.
                log.info("this backward will be compiled when it is needed: %s", error)
    if kernels.waits:
        with stage("build kernels"):
            kernels.finish()


def _static_slots(inputs: Inputs) -> list[int]:
    """Slots of captured tensors: parameters and buffers keep their address."""
    return [
        slot
        for slot, origin in inputs.origins.items()
        if origin.text is None and origin.leaf >= inputs.num_arguments
    ]
