"""The backend: one graph of Dynamo's becomes a program over plain tensors.

Dynamo hands over a graph of outer ops and real arguments, and guards what the user's Python read. The pass fakes the
arguments with Dynamo's own fake mode, so that what it assumes of sizes becomes Dynamo's guards, and emits a wrapper
without checks. What it does not take goes to PyTorch's AOTAutograd, with the reason logged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, fx

from desugar import _torch as private
from desugar.backends.base import Backend
from desugar.backends.choose import choose_backend
from desugar.dynamo.guard_failures import describe_failure, note_program
from desugar.dynamo.inner_assignment import break_at_assignments
from desugar.dynamo.profiling import naming_itself
from desugar.dynamo.property_getters import trace_properties
from desugar.dynamo.specialize import Specialized
from desugar.errors import DesugarError
from desugar.frontend.fakes import Fakes, check_memory
from desugar.frontend.inputs import Inputs, StaticNeeded
from desugar.pipeline import build_program
from desugar.program import Program
from desugar.recording.listeners import Caller, Recording, caller
from desugar.recording.trace_artifacts import record_compilation
from desugar.recording.user_names import function_name, leaf_names
from desugar.wrapper.recompute import Again

log = logging.getLogger("desugar")

STRICT = "DESUGAR_STRICT"  # in the environment: what the pass does not take is an error


def dynamo_backend(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles one Dynamo graph.

    Args:
        gm: The graph, over outer tensors.
        example_inputs: Real tensors and subclasses, and symbolic ints.
        mode: As for `torch.compile`.
        options: `{"backend": "eager"}` runs the plain graphs as they are; `{"strict": True}` makes what the pass does
            not take an error; other options are Inductor's.

    Returns:
        A function of the graph's arguments.

    Raises:
        DesugarError: The pass does not take the graph, and stock would be wrong or `strict` is set.
    """
    if private.forward_ad._current_level >= 0 or private.peek_interpreter_stack() is not None:
        log.info(
            "this graph runs op by op: forward-mode differentiation or a functorch transform looks at each op"
        )
        return gm.forward  # Dynamo guards the level and the transforms, so this is for such calls alone
    rest = dict(options or {})
    inner = rest.pop("backend", "inductor")
    strict = rest.pop("strict", os.environ.get(STRICT, "0") not in ("", "0"))
    backend = choose_backend(inner, mode, rest)
    try:
        program = compile_graph(gm, example_inputs, backend)
    except (DesugarError, StaticNeeded) as error:
        refused = _refusal(error)
        if strict or refused.stock_is_wrong:
            raise refused from None if refused is error else error
        log.warning("AOTAutograd compiles this graph instead: %s", refused)
        return _stock(inner, mode, rest)(gm, example_inputs)
    return program.run


def _refusal(error: DesugarError | StaticNeeded) -> DesugarError:
    if isinstance(error, DesugarError):
        return error
    return DesugarError(
        "a zero gradient would be traced with constant sizes, and the sizes of this call are symbols",
        instead="compile with dynamic=False",
    )


def compile_graph(gm: fx.GraphModule, example_inputs: list[Any], backend: Backend) -> Program:
    """The program of one Dynamo graph."""
    if backend.reads_memory:
        check_memory(example_inputs)
    context = private.TracingContext.try_get()
    mode = context.fake_mode if context is not None else private.detect_fake_mode(example_inputs)
    fakes = Fakes(mode.shape_env, mode) if mode is not None else Fakes()
    inputs, leaves = Inputs(fakes), list(example_inputs)

    def call(traced: list[Any]) -> Any:
        return gm(*traced)

    def compile_again(fn: Callable[[list[Any]], Any]) -> Specialized:
        return Specialized(fn, backend, "a derivative", gm, names)

    met = caller()
    names = leaf_names(gm, None if met is None else met.what)
    made = _recording(gm, leaves, met, describe_failure(met, dict(zip(names, leaves, strict=True))))
    made.guards = () if context is None else tuple(context.guards_context.dynamo_guards)
    with record_compilation(made):
        inputs.add_faked(
            leaves, [_fake(leaf, fakes.mode, context) for leaf in leaves], private.source_names(gm)
        )
        otherwise = Specialized(call, backend, "arguments that share memory", gm, names)
        program = build_program(Again(call, compile_again), inputs, leaves, backend, otherwise)
        program.names = names
    program.is_whole = not private.ends_in_graph_break(gm)
    note_program(program)
    if met is not None:
        program.call_directly()
        met.add(program, made.failed or made.reason)
    else:
        name, failed = function_name(gm, gm), f": {made.failed}" if made.failed else ""
        log.info("compiled a graph of %s for torch.compile%s", name, failed)
        program.run = naming_itself(program, name, gm.forward)
    program.run.program = program  # type: ignore[attr-defined]
    return program


def _recording(gm: fx.GraphModule, leaves: list[Any], met: Caller | None, failed: str) -> Recording:
    """What is compiled, for whom and why."""
    fn, first = (gm, "a graph of torch.compile") if met is None else (met.what, met.reason)
    return Recording(fn, "a guard failed" if failed else first, tuple(leaves), gm, failed)


def _fake(leaf: Any, mode: Any, context: Any) -> Any:
    """The fake of one argument, with the symbols and sources that Dynamo gave it."""
    if not isinstance(leaf, Tensor) or isinstance(leaf, private.FakeTensor):
        return leaf
    known = context.tensor_to_context.get(leaf) if context is not None else None
    fake = mode.from_tensor(leaf, symbolic_context=known, source=known.tensor_source if known else None)
    with mode:  # a class written by hand may make tensors in its dispatch
        return fake.detach() if fake.requires_grad else fake


def _stock(inner: Any, mode: str | None, options: Mapping[str, Any]) -> Callable[..., Any]:
    """PyTorch's own backend for the same compiler."""
    if inner == "inductor":
        return private.TorchCompileInductorWrapper(mode or "default", dict(options), None)
    if inner == "eager":
        return private.lookup_backend("aot_eager")
    return private.aot_autograd(fw_compiler=inner)


break_at_assignments(dynamo_backend)
trace_properties(dynamo_backend)
