"""One compiled signature: graphs, layouts, wrapper text, and the function that runs it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from desugar import (
    _torch as private,
    check,
    compilers,
    conditions as conditions,
    listening,
    loops as loops,
    refuse,
)
from desugar.arguments import Unpacking
from desugar.attributes import ModuleAttributes
from desugar.compilers import Backend, GraphKind
from desugar.differentiation import Again, CompileAgain
from desugar.direct import call_directly
from desugar.effects import sink_tokens
from desugar.errors import StateKept
from desugar.fakes import Fakes
from desugar.family import Family
from desugar.faults import Faults
from desugar.files import WRAPPER_FILE
from desugar.graphs import copy_graph
from desugar.inputs import BuiltInside, DynamicPolicy, DynamoInside, Inputs, StaticNeeded
from desugar.leftovers import check_leftovers
from desugar.listening import stage
from desugar.modes import autocast_state, inlined_compiles, is_autocast
from desugar.outputs import store_positions, token_positions, written_slots
from desugar.overlap import Kernels, expected_tangents
from desugar.partition import FromForward, partition
from desugar.signature import State
from desugar.state import root_modules
from desugar.trace import Traced, discover, trace_graph
from desugar.values import Value, describe
from desugar.wrappers import Parts, emit_program
from desugar.writes import keep_old_values, store_results
from subclasses.build import build_functions

log = logging.getLogger("desugar")

# ------------------------------------------------------------------------------------------------- programs


@dataclass(eq=False)
class Program:
    """What one signature of a function was compiled to.

    Attributes:
        forward: Graph over plain tensors; returns results, then what is saved for the backward.
        backward: Graph over plain tensors, or None where nothing requires grad.
        joint: The graph before it was split (equal to `forward` in inference).
        inputs: One value per input leaf: arguments, then captured tensors.
        outputs: One value per leaf of the result.
        wrapper: The text of the generated wrapper.
        family: The backwards, or None where nothing requires grad.
        saved_bytes: Bytes saved for the backward besides inputs and results; None if symbolic.
        run: `run(args, kwargs)`; returns `desugar.signature.MISS` when the call has another signature.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    joint: fx.GraphModule
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    wrapper: str
    family: Family | None
    saved_bytes: int | None
    run: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    is_dynamic: bool = False

    @property
    def source(self) -> str:
        """The text of everything generated so far: the wrapper, then each backward that was needed."""
        return "\n\n".join([self.wrapper, *(self.family.sources if self.family else ())])

    def __str__(self) -> str:
        lines = ["inputs:"] + [describe(value, "  ") for value in self.inputs]
        lines += ["outputs:"] + [describe(value, "  ") for value in self.outputs]
        lines += ["forward:", self.forward.print_readable(print_output=False)]
        if self.backward is not None:
            lines += ["backward:", self.backward.print_readable(print_output=False)]
        return "\n".join([*lines, "wrapper:", self.source])


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be compiled: the function, one call's arguments, and the state around it."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    backend: Backend
    policy: DynamicPolicy
    find_state: Callable[[list[Any], list[nn.Module]], State]
    compile_again: CompileAgain


def build_program(request: Request) -> Program:
    """Traces, checks, splits, compiles and wraps a function for one signature.

    Raises:
        DesugarError: For what the pass does not take. Arguments are untouched.
    """
    unpacking, leaves = Unpacking.of(request.args, request.kwargs)
    refuse.check_arguments(leaves)
    ran: list[nn.Module] = []
    fn, treespec = request.fn, unpacking.treespec  # not the request: the arguments are not to be kept alive

    def call(traced_leaves: list[Any]) -> Any:
        args, kwargs = treespec.unflatten(traced_leaves)
        with _recording_modules(ran, attributes), faults.watching((args, kwargs), traced_leaves, treespec):
            result = fn(*args, **kwargs)
        refuse.check_containers((args, kwargs), traced_leaves, treespec)
        return result

    faults, attributes = Faults(fn), ModuleAttributes(root_modules(fn, leaves))

    def begin() -> Inputs:
        inputs = Inputs(Fakes(), policy, built=built)
        ran.clear()
        attributes.stand_ins = inputs.stand_ins
        inputs.add_arguments(leaves)
        return inputs

    with attributes.restored_on_error():
        policy, built, inlined = request.policy, {}, False
        while True:
            inputs = begin()
            try:
                with inlined_compiles(inlined):
                    stages = run_stages(Again(call, request.compile_again), inputs, request.backend)
                return wrap_program(stages, inputs, unpacking, leaves, request.find_state(leaves, ran))
            except StaticNeeded:
                policy = DynamicPolicy()
            except DynamoInside:
                inlined = True
            except BuiltInside as made:
                built = {**built, made.key: made.inner}
            except Exception as error:
                if not inputs.fakes.symbols or isinstance(error, StateKept):
                    faults.locate(error, lambda: run_once(Again(call, request.compile_again), begin()))
                    raise
                policy = DynamicPolicy()  # a dict of sizes, numpy, json: what takes ints may take no symbols
                log.info("sizes are constants of this program: %s: %s", type(error).__name__, error)


def run_stages(again: Again, inputs: Inputs, backend: Backend) -> Stages:
    """Everything between the inputs and the wrapper: two runs, the split, the compiler, a check after each."""
    with private.compiled_autograd._disable(), _ordinary_mode():
        private.shared_nested_tensor()
        with stage("discover"):
            outputs = discover(again.call, inputs)
        with stage("trace"):
            traced = trace_graph(again.call, inputs, outputs, backend.decompositions())
        check_leftovers(inputs.made, traced.outputs)
        check.check_traced(traced, len(inputs.flat.items))
        return _compile(backend, inputs, traced, again)


def run_once(again: Again, inputs: Inputs) -> None:
    """The first run alone, to see where something happens."""
    with private.compiled_autograd._disable(), _ordinary_mode():
        discover(again.call, inputs)


def _ordinary_mode() -> contextlib.AbstractContextManager[Any]:
    """Inference mode is left for the trace (fake tensors know no inference tensors); gradients stay off."""
    if not torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    return stack


def wrap_program(
    stages: Stages,
    inputs: Inputs,
    unpacking: Unpacking,
    leaves: list[Any],
    state: State,
    *,
    trusted: bool = False,
) -> Program:
    """The runnable program; `trusted` where somebody else has checked the signature."""
    parts = Parts(
        inputs=inputs,
        outputs=stages.traced.outputs,
        traced=stages.traced,
        state=state,
        leaves=leaves,
        unpacking=unpacking,
        forward=stages.compiled_forward,
        family=stages.family,
        autocast=is_autocast(autocast_state()),
        trusted=trusted,
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
        is_dynamic=bool(inputs.fakes.symbols),
    )
    functions = build_functions(text.source, text.namespace, filename=WRAPPER_FILE, owner=program)
    program.run = functions["run"]  # type: ignore[assignment]
    if stages.family is not None:
        stages.family.function = functions["Backward"]
    if not trusted:  # Dynamo knows of no profiler, so what Inductor's own call tells it stays
        call_directly(program.run)
    if (recording := listening.current()) is not None:
        recording.program, recording.inputs, recording.traced = program, inputs, stages.traced
    inputs.release_arguments()
    return program


def _unbuilt(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise RuntimeError("the wrapper of this program has not been built")


class _recording_modules:
    """Notes the modules whose forward runs: the program depends on their `training` and their slots."""

    def __init__(self, ran: list[nn.Module], attributes: ModuleAttributes) -> None:
        self.ran, self.attributes, self.thread = ran, attributes, threading.get_ident()

    def __enter__(self) -> None:
        self.attributes.restore()
        self.handle = nn.modules.module.register_module_forward_pre_hook(self._note)

    def __exit__(self, kind: type | None, *exc: object) -> None:
        self.handle.remove()
        if kind is None:
            self.attributes.check_kept()

    def _note(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() != self.thread:  # the hook is one for the whole process
            return
        self.attributes.note(module)
        if not any(module is seen for seen in self.ran):
            self.ran.append(module)


# ------------------------------------------------------------------------------------------------ compiling


@dataclass(frozen=True, slots=True)
class Stages:
    """What the stages made of a traced function: kept graphs, and the compiled ones."""

    traced: Traced
    joint: fx.GraphModule
    forward: fx.GraphModule
    compiled_forward: compilers.CompiledGraph
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
        check.check_stores(traced.graph, stores)
        kind = GraphKind("inference", traced.num_forward, tuple(static))
        with stage("compile"):
            compiled, _ = compilers.compile_forward(backend, traced.graph, kind, mode)
        return Stages(traced, joint, joint, compiled)
    with compilers.compiling(mode), stage("partition"):
        partitioned = partition(traced, inputs.primals(), static, backend.split)
    check.check_partitioned(partitioned, traced, len(inputs.flat.items))
    partitioned = keep_old_values(partitioned, written_slots(inputs.values, traced.outputs))
    kept = {source.index for source in partitioned.backward_inputs if isinstance(source, FromForward)}
    sink_tokens(partitioned.forward, token_positions(traced.outputs))
    store_results(partitioned.forward, stores, kept)
    check.check_stores(partitioned.forward, stores)
    forward = copy_graph(partitioned.forward)
    kind = GraphKind("forward", traced.num_forward, tuple(static))
    with stage("compile forward"), backend.postpone(forward) as kernels:
        compiled, strides = compilers.compile_forward(backend, partitioned.forward, kind, mode)
    for position, source in enumerate(partitioned.backward_inputs):
        if strides is not None and isinstance(source, FromForward):
            compilers.restride_saved(partitioned.backward, position, strides[source.index])
    family = Family(inputs, traced, replace(partitioned, forward=forward), backend, again)
    _compile_backward(family, kernels)
    return Stages(traced, joint, forward, compiled, family)


def _compile_backward(family: Family, kernels: Kernels) -> None:
    """Compiles the expected backward, for what it assumes of sizes or while the forward's kernels are built."""
    has_symbols = bool(family.inputs.fakes.symbols)
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
