"""The Dynamo backend: compiles a Dynamo graph to a program over plain tensors.

Dynamo passes a graph of outer ops and real arguments to the backend, and guards the values that the user's Python code
read. This module makes fakes of the arguments in Dynamo's own fake mode, so that its assumptions about sizes become
Dynamo's guards. The runtime wrapper repeats none of them. It checks only facts that Dynamo does not guard: overlaps
of a mutated tensor with others, storage offsets, global sizes of DTensors, and inference mode. A graph that desugaring
does not support goes to PyTorch's AOTAutograd, and the reason is logged.

A function that differentiates a Dynamo graph is compiled once for each kind of arguments (:class:`Specialized`). Dynamo
has not captured such a function, so it has no guards for its programs. Calls are rare, so this module compares the
facts that a program depends on in Python. Sizes are constants of a program.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from desugar import _torch as torch_private, _torch_views
from desugar.backends.base import Backend
from desugar.backends.choose import choose_backend
from desugar.backward.recompute import CapturedFunction
from desugar.dynamo.aot_autograd import compile_by_stock, is_saving, run_op_by_op
from desugar.dynamo.attributes import break_at_assignments, trace_properties
from desugar.dynamo.guard_failures import describe_failure, note_program
from desugar.dynamo.profiling import with_profiler_name
from desugar.errors import DesugarError
from desugar.flatten.inputs import Inputs, check_memory
from desugar.flatten.rule_state import guard_state, state_read_by_rules
from desugar.ir.values import dynamic_names, is_wrapper, take_apart
from desugar.pipeline import build_program
from desugar.program import Program
from desugar.recording.listeners import Recording, compilation_owner
from desugar.recording.trace_artifacts import record_compilation
from desugar.recording.user_names import function_name, leaf_names
from desugar.store.programs import ProgramCache, find_store_cache
from subclasses.slow_paths import say_once

log = logging.getLogger("desugar")

MAX_PROGRAMS = 8  # like Dynamo's limit; a call that needs one more program runs op by op
STRICT = "DESUGAR_STRICT"  # environment variable: a graph that desugaring does not support is an error

# ---------------------------------------------------------------------------------------------- Dynamo's graphs


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
            desugaring does not support an error. All other options are Inductor's.

    Returns:
        A function of the graph's arguments.

    Raises:
        DesugarError: Desugaring does not support the graph, and AOTAutograd would compute a wrong result or `strict` is
            set.
    """
    if torch_private.forward_ad._current_level >= 0 or torch_private.peek_interpreter_stack() is not None:
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
    gm: fx.GraphModule, example_inputs: list[Any], backend: Backend, cache: ProgramCache | None = None
) -> Program:
    """Compiles one Dynamo graph to a program.

    Args:
        gm: The graph.
        example_inputs: Real tensors and subclasses, and symbolic ints.
        backend: The compiler of the plain graphs.
        cache: Keeps the program; None for its cache in the store.

    Raises:
        DesugarError: Desugaring does not support the graph.
    """
    torch_private.leave_guards_untimed()
    if backend.reads_memory:
        check_memory(example_inputs)
    context = torch_private.TracingContext.try_get()
    mode = context.fake_mode if context is not None else torch_private.detect_fake_mode(example_inputs)
    inputs, leaves = Inputs() if mode is None else Inputs(mode), list(example_inputs)
    owner, read = compilation_owner(), state_read_by_rules(gm, leaves)
    names = leaf_names(gm, None if owner is None else owner.what)
    failed = describe_failure(owner, dict(zip(names, leaves, strict=True)))
    fn, reason = (gm, "a graph of torch.compile") if owner is None else (owner.what, owner.reason)
    made = Recording(fn, "a guard failed" if failed else reason, tuple(leaves), gm, failed)
    made.guards = () if context is None else tuple(context.guards_context.dynamo_guards)
    with record_compilation(made):
        inputs.add_faked(
            leaves,
            [_make_fake(leaf, inputs.mode, context) for leaf in leaves],
            torch_private.source_names(gm),
        )
        on_mismatch = run_op_by_op(
            gm, f"a call of {function_name(gm, gm)} whose arguments overlap or begin elsewhere in memory"
        )
        cache = cache or find_store_cache(gm, inputs, backend, read)
        captured = CapturedFunction(
            lambda traced: gm(*traced), lambda fn: Specialized(fn, backend, "a derivative", gm, names)
        )
        program = build_program(captured, inputs, backend, on_mismatch, cache)
        program.names = names
    program.is_whole = not torch_private.ends_in_graph_break(gm)
    guard_state(read)
    note_program(program)
    if owner is not None:
        program.call_directly()
        owner.add(program, failed or reason)
    else:
        name = function_name(gm, gm)
        log.info(
            "%s a graph of %s for torch.compile%s", program.origin, name, f": {failed}" if failed else ""
        )
        program.run = with_profiler_name(program, name, gm.forward)
    program.run.program = program  # type: ignore[attr-defined]
    return program


def _make_fake(leaf: Any, mode: Any, context: Any) -> Any:
    """Returns the fake of one argument, with the symbols and the source that Dynamo gave it."""
    if not isinstance(leaf, Tensor) or getattr(leaf, "fake_mode", None) is mode:
        return leaf
    known = context.tensor_to_context.get(leaf) if context is not None else None
    with mode:  # the dispatch of a handwritten class may make tensors
        fake = mode.from_tensor(leaf, symbolic_context=known, source=known.tensor_source if known else None)
        return fake.detach() if fake.requires_grad else fake


# ------------------------------------------------------------------------------- derivatives: facts of a call


def facts_of(leaves: Sequence[Any]) -> list[Any]:
    """Returns the properties of the argument leaves of a call that a program may depend on.

    They are types, layouts, dtypes, devices, sizes, strides, constants, and which tensors are identical. Also the modes
    that PyTorch's C++ check of the global state does not cover.
    """
    facts: list[Any] = [torch.is_inference_mode_enabled(), torch_private.num_function_modes()]
    seen: dict[int, tuple[int, Tensor]] = {}
    for leaf in leaves:
        _add_leaf(leaf, facts, seen)
    return facts


def _add_leaf(leaf: Any, facts: list[Any], seen: dict[int, tuple[int, Tensor]]) -> None:
    if not isinstance(leaf, Tensor):
        facts.append((type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf))
        return
    number, _ = seen.setdefault(id(leaf), (len(seen), leaf))
    facts.append((number, type(leaf), leaf.dtype, leaf.device, leaf.requires_grad))
    facts.append((tuple(leaf.size()), tuple(leaf.stride())))
    if is_wrapper(leaf):
        names, context = take_apart(leaf)
        facts.append((names, context, [getattr(leaf, name) for name in dynamic_names(type(leaf))]))
        for name in names:
            _add_leaf(getattr(leaf, name), facts, seen)


# ---------------------------------------------------------------------------------------- derivatives: programs


@dataclass(frozen=True, slots=True)
class GuardedProgram:
    """A program and its guards.

    Attributes:
        facts: The facts of the call that it was compiled for.
        state: PyTorch's C++ check of the global state.
    """

    program: Program
    facts: list[Any]
    state: Any

    def fits(self, facts: list[Any]) -> bool:
        """Returns whether the guards hold for a call."""
        return facts == self.facts and self.state.check()


class Specialized:
    """A function from argument leaves to a tuple, compiled for the facts of each call.

    Attributes:
        call: The function. It takes a list of leaves and depends on nothing else.
        backend: The compiler of its plain graphs.
        reason: Why it is compiled, for reports.
        graph: The Dynamo graph that it differentiates.
        names: The user's names for the arguments of the graph, which are the first leaves.
        entries: The programs, the newest first.
    """

    def __init__(
        self,
        call: Callable[[list[Any]], Any],
        backend: Backend,
        reason: str,
        graph: fx.GraphModule,
        names: tuple[str, ...],
    ) -> None:
        self.call, self.backend, self.reason, self.graph, self.names = call, backend, reason, graph, names
        self.entries: list[GuardedProgram] = []
        self._lock = threading.RLock()

    def __call__(self, *leaves: Any) -> tuple[Any, ...]:
        """Runs the program whose guards hold for these leaves; compiles one if there is none."""
        facts = facts_of(leaves)
        program = self._find(facts)
        if program is None:
            with self._lock:
                program = self._find(facts) or self._compile(facts, leaves)
        return self.run_itself(*leaves) if program is None else program.run(*leaves)

    def run_itself(self, *leaves: Any) -> tuple[Any, ...]:
        """Runs the function without a program."""
        return self.call(list(leaves))  # type: ignore[no-any-return]

    def _find(self, facts: list[Any]) -> Program | None:
        return next((entry.program for entry in self.entries if entry.fits(facts)), None)

    def _compile(self, facts: list[Any], leaves: Sequence[Any]) -> Program | None:
        if len(self.entries) >= MAX_PROGRAMS:
            say_once(
                f"{self.reason} runs op by op: {MAX_PROGRAMS} programs were compiled for other sizes or kinds",
                "pad the arguments of second derivatives to a few sizes",
                "desugar",
            )
            return None
        state, inputs = torch_private.GlobalStateGuard(), Inputs()
        with record_compilation(Recording(self.graph, self.reason, tuple(leaves), self.graph)):
            inputs.add_arguments(leaves)
            function = CapturedFunction(
                self.call,
                lambda fn: Specialized(fn, self.backend, "a further derivative", self.graph, self.names),
            )
            program = build_program(function, inputs, self.backend, self.run_itself)
            gradients = tuple(f"gradient {n}" for n in range(1, len(leaves) - len(self.names) + 1))
            program.names = self.names + gradients
        self.entries.insert(0, GuardedProgram(program, facts, state))
        return program


# ------------------------------------------------------------------------------------- Dynamo, for this backend

break_at_assignments(dynamo_backend)
trace_properties(dynamo_backend)
_torch_views.convert_by_inner_tensors(dynamo_backend)
