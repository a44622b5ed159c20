"""Compiles functions that differentiate a Dynamo graph, once for each kind of arguments.

Dynamo has not captured such a function, so it has no guards for its programs. Calls are rare, so this module compares
the facts that a program depends on in Python. Sizes are constants of a program.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from desugar import _torch as private
from desugar.backends.base import Backend
from desugar.backward.recompute import CapturedFunction
from desugar.flatten.inputs import Inputs
from desugar.ir.values import dynamic_names, is_wrapper, take_apart
from desugar.pipeline import build_program
from desugar.program import Program
from desugar.recording.listeners import Recording
from desugar.recording.trace_artifacts import record_compilation
from subclasses.slow_paths import say_once

MAX_PROGRAMS = 8  # like Dynamo's limit; a call that needs one more program runs op by op

# ---------------------------------------------------------------------------------------------------- facts


def facts_of(leaves: Sequence[Any]) -> list[Any]:
    """Returns the properties of the argument leaves of a call that a program may depend on.

    They are types, layouts, dtypes, devices, sizes, strides, constants, and which tensors are identical.
    """
    facts: list[Any] = []
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


# ------------------------------------------------------------------------------------------------- programs


@dataclass(frozen=True, slots=True)
class GuardedProgram:
    """A program and its guards.

    Attributes:
        facts: The facts of the call that it was compiled for.
        state: PyTorch's C++ check of the global state.
        modes: The modes that this check does not cover.
    """

    program: Program
    facts: list[Any]
    state: Any
    modes: tuple[Any, ...]

    def fits(self, facts: list[Any]) -> bool:
        """Returns whether the guards hold for a call."""
        return facts == self.facts and self.state.check() and _modes() == self.modes


def _modes() -> tuple[Any, ...]:
    """Returns the modes that the C++ check of the global state does not cover."""
    return torch.is_inference_mode_enabled(), private.num_function_modes()


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
        state, inputs = private.GlobalStateGuard(), Inputs()
        with record_compilation(Recording(self.graph, self.reason, tuple(leaves), self.graph)):
            inputs.add_arguments(leaves)
            function = CapturedFunction(self.call, self._differentiate)
            program = build_program(function, inputs, self.backend, self.run_itself)
            gradients = tuple(f"gradient {n}" for n in range(1, len(leaves) - len(self.names) + 1))
            program.names = self.names + gradients
        self.entries.insert(0, GuardedProgram(program, facts, state, _modes()))
        return program

    def _differentiate(self, fn: Callable[[list[Any]], Any]) -> Specialized:
        return Specialized(fn, self.backend, "a further derivative", self.graph, self.names)


__all__ = ["Specialized", "facts_of"]
