"""The Dynamo backend: compiles a Dynamo graph to a program over plain tensors.

Dynamo passes a graph of outer ops and real arguments to the backend, and guards the values that the user's Python code
read. The pass makes fakes of the arguments in Dynamo's own fake mode, so that its assumptions about sizes become
Dynamo's guards. The generated wrapper then needs no checks. A graph that the pass does not support goes to PyTorch's
AOTAutograd, and the reason is logged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, fx

from desugar import _torch as private, _torch_guards, _torch_views
from desugar.backends.base import Backend
from desugar.backends.choose import choose_backend
from desugar.backward.recompute import CapturedFunction
from desugar.dynamo.attributes import break_at_assignments, trace_properties
from desugar.dynamo.derivatives import Specialized
from desugar.dynamo.fallback import compile_by_stock, is_saving, run_op_by_op
from desugar.dynamo.guard_failures import describe_failure, note_program
from desugar.dynamo.profiling import with_profiler_name
from desugar.errors import DesugarError
from desugar.flatten.inputs import Inputs, check_memory
from desugar.flatten.rule_state import guard_state, state_read_by_rules
from desugar.pipeline import build_program
from desugar.program import Program
from desugar.recording.listeners import Caller, Recording, caller
from desugar.recording.trace_artifacts import record_compilation
from desugar.recording.user_names import function_name, leaf_names
from desugar.store.programs import Place, place_of

log = logging.getLogger("desugar")

STRICT = "DESUGAR_STRICT"  # environment variable: a graph that the pass does not support is an error


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
        options: `{"backend": "eager"}` runs the plain graphs without a compiler. `{"strict": True}` makes a graph that
            the pass does not support an error. All other options are Inductor's.

    Returns:
        A function of the graph's arguments.

    Raises:
        DesugarError: The pass does not support the graph, and AOTAutograd would compute a wrong result or `strict` is
            set.
    """
    if private.forward_ad._current_level >= 0 or private.peek_interpreter_stack() is not None:
        log.info(
            "this graph runs op by op: forward-mode differentiation or a functorch transform looks at each op"
        )
        return gm.forward  # Dynamo guards the level and the transforms, so no other call gets this result
    rest = dict(options or {})
    inner = rest.pop("backend", "inductor")
    strict = rest.pop("strict", os.environ.get(STRICT, "0") not in ("", "0"))
    backend = choose_backend(inner, mode, rest)
    try:
        if is_saving():
            raise DesugarError(
                "PyTorch saves functions that its own AOTAutograd compiled (aot_compile)",
                instead="save the function with desugar.save to keep this program",
            )
        program = compile_graph(gm, example_inputs, backend)
    except DesugarError as error:
        if strict or error.stock_is_wrong:
            raise
        return compile_by_stock(gm, example_inputs, inner, mode, rest, error)
    return program.run


def compile_graph(
    gm: fx.GraphModule, example_inputs: list[Any], backend: Backend, place: Place | None = None
) -> Program:
    """Compiles one Dynamo graph to a program.

    Args:
        gm: The graph.
        example_inputs: Real tensors and subclasses, and symbolic ints.
        backend: The compiler of the plain graphs.
        place: Where the program is kept; None for its place in the store.

    Raises:
        DesugarError: The pass does not support the graph.
    """
    _torch_guards.leave_guards_untimed()
    if backend.reads_memory:
        check_memory(example_inputs)
    context = private.TracingContext.try_get()
    mode = context.fake_mode if context is not None else private.detect_fake_mode(example_inputs)
    inputs, leaves = Inputs() if mode is None else Inputs(mode), list(example_inputs)

    def call(traced: list[Any]) -> Any:
        return gm(*traced)

    def compile_again(fn: Callable[[list[Any]], Any]) -> Specialized:
        return Specialized(fn, backend, "a derivative", gm, names)

    owner, read = caller(), state_read_by_rules(gm, leaves)
    names = leaf_names(gm, None if owner is None else owner.what)
    made = _recording(gm, leaves, owner, describe_failure(owner, dict(zip(names, leaves, strict=True))))
    made.guards = () if context is None else tuple(context.guards_context.dynamo_guards)
    with record_compilation(made):
        inputs.add_faked(
            leaves, [_make_fake(leaf, inputs.mode, context) for leaf in leaves], private.source_names(gm)
        )
        fallback = run_op_by_op(
            gm, f"a call of {function_name(gm, gm)} whose arguments overlap or begin elsewhere in memory"
        )
        place = place or place_of(gm, inputs, backend, read)
        captured = CapturedFunction(call, compile_again)
        program = build_program(captured, inputs, backend, fallback, place)
        program.names = names
    program.is_whole = not private.ends_in_graph_break(gm)
    guard_state(read)
    note_program(program)
    if owner is not None:
        program.call_directly()
        owner.add(program, made.failed or made.reason)
    else:
        name, failed = function_name(gm, gm), f": {made.failed}" if made.failed else ""
        log.info("%s a graph of %s for torch.compile%s", program.origin, name, failed)
        program.run = with_profiler_name(program, name, gm.forward)
    program.run.program = program  # type: ignore[attr-defined]
    return program


def _recording(gm: fx.GraphModule, leaves: list[Any], owner: Caller | None, failed: str) -> Recording:
    """Makes the recording of a compilation, with the compiled function and the reason."""
    fn, first = (gm, "a graph of torch.compile") if owner is None else (owner.what, owner.reason)
    return Recording(fn, "a guard failed" if failed else first, tuple(leaves), gm, failed)


def _make_fake(leaf: Any, mode: Any, context: Any) -> Any:
    """Returns the fake of one argument, with the symbols and the source that Dynamo gave it."""
    if not isinstance(leaf, Tensor) or getattr(leaf, "fake_mode", None) is mode:
        return leaf
    known = context.tensor_to_context.get(leaf) if context is not None else None
    with mode:  # the dispatch of a handwritten class may make tensors
        fake = mode.from_tensor(leaf, symbolic_context=known, source=known.tensor_source if known else None)
        return fake.detach() if fake.requires_grad else fake


break_at_assignments(dynamo_backend)
trace_properties(dynamo_backend)
_torch_views.convert_by_inner_tensors(dynamo_backend)
