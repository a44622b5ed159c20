"""Compiles a function of argument leaves once for each set of facts that Dynamo does not guard.

Two kinds of functions are compiled here: a graph whose arguments share memory in a way that Dynamo does not guard, and
a function that differentiates another one. Their calls are rare, so the facts are compared in Python.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from desugar import _torch as private
from desugar.backends.base import Backend
from desugar.flatten.fakes import Fakes, SizeGuards, size_guards
from desugar.flatten.inputs import Inputs, StaticNeeded
from desugar.ir.storage import storage_of
from desugar.ir.values import dynamic_names, inner_names, is_wrapper, take_apart
from desugar.pipeline import build_program
from desugar.program import Program
from desugar.recording.listeners import Recording
from desugar.recording.trace_artifacts import record_compilation
from desugar.wrapper.recompute import CapturedFunction

MAX_PROGRAMS = 64  # a call that would need one more program runs the function itself

# ---------------------------------------------------------------------------------------------------- facts


@dataclass(frozen=True, slots=True)
class Facts:
    """Properties of the argument leaves of one call that a program may depend on.

    Attributes:
        structure: Types, layouts, dtypes, devices, constants; which tensors are identical, and which share memory.
        extents: Sizes, strides and dynamic ints.
    """

    structure: tuple[Any, ...]
    extents: tuple[Any, ...]


def facts_of(leaves: Sequence[Any]) -> Facts:
    """Returns the facts of the argument leaves of a call."""
    structure: list[Any] = []
    extents: list[Any] = []
    plain: dict[int, Tensor] = {}
    for leaf in leaves:
        _add_leaf(leaf, structure, extents, plain)
    structure.append(tuple(_shared_memory([*plain.values()])))
    return Facts(tuple(structure), tuple(extents))


def _add_leaf(leaf: Any, structure: list[Any], extents: list[Any], plain: dict[int, Tensor]) -> None:
    if not isinstance(leaf, Tensor):
        structure.append((type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf))
        return
    structure.append((type(leaf), leaf.dtype, leaf.device, leaf.requires_grad, leaf.dim()))
    extents.append((tuple(leaf.size()), tuple(leaf.stride())))
    if not is_wrapper(leaf):
        plain.setdefault(id(leaf), leaf)
        structure.append([*plain].index(id(leaf)))
        return
    names, context = take_apart(leaf)
    structure.append((names, context))
    extents.append(tuple(getattr(leaf, name) for name in dynamic_names(type(leaf))))
    for name in names:
        _add_leaf(getattr(leaf, name), structure, extents, plain)


def _shared_memory(tensors: Sequence[Tensor]) -> Iterator[Any]:
    """Yields, for each tensor that shares its storage with another one, the storage and the place in it; else None."""
    storages = [storage_of(tensor) for tensor in tensors]
    for tensor, storage in zip(tensors, storages, strict=True):
        if storages.count(storage) > 1:
            nbytes = tensor.untyped_storage().nbytes()
            yield storages.index(storage), tensor.storage_offset(), tensor.size(), tensor.stride(), nbytes
        else:
            yield None


# ------------------------------------------------------------------------------------------------- programs


@dataclass(frozen=True, slots=True)
class GuardedProgram:
    """A program and its guards.

    Attributes:
        facts: The facts of the call that it was compiled for.
        state: PyTorch's C++ check of the global state.
        modes: The modes that this check does not cover.
        offsets: The storage offsets of the plain tensors; None if the program does not depend on them.
        guards: The guards on sizes; None if sizes are constants.
    """

    program: Program
    facts: Facts
    state: Any
    modes: tuple[Any, ...]
    offsets: tuple[int, ...] | None
    guards: SizeGuards | None

    def fits(self, facts: Facts, leaves: Sequence[Any]) -> bool:
        """Returns whether the guards hold for a call."""
        if facts.structure != self.facts.structure or not self.state.check() or _modes() != self.modes:
            return False
        if self.offsets is not None and self.offsets != offsets_of(leaves):
            return False
        return facts.extents == self.facts.extents if self.guards is None else self.guards.hold(leaves)


def _modes() -> tuple[Any, ...]:
    """Returns the modes that the C++ check of the global state does not cover."""
    return torch.is_inference_mode_enabled(), private.num_function_modes()


def offsets_of(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Returns the storage offsets of all plain tensors, inner ones included."""
    found: list[int] = []
    for leaf in leaves:
        if is_wrapper(leaf):
            found += offsets_of([getattr(leaf, name) for name in inner_names(leaf)])
        elif isinstance(leaf, Tensor):
            found.append(int(leaf.storage_offset()))
    return tuple(found)


class Specialized:
    """A function from argument leaves to a tuple, compiled for the facts of each call.

    Attributes:
        call: The function. It takes a list of leaves and depends on nothing else.
        backend: The compiler of its plain graphs.
        reason: Why it is compiled, for reports.
        graph: The Dynamo graph that it runs or differentiates.
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
        program = self._find(facts, leaves)
        if program is None:
            with self._lock:
                program = self._find(facts, leaves) or self._compile(facts, leaves)
        return self.call(list(leaves)) if program is None else program.run(*leaves)

    def _find(self, facts: Facts, leaves: Sequence[Any]) -> Program | None:
        return next((entry.program for entry in self.entries if entry.fits(facts, leaves)), None)

    def _compile(self, facts: Facts, leaves: Sequence[Any]) -> Program | None:
        if len(self.entries) >= MAX_PROGRAMS:
            return None
        # As with automatic dynamic shapes, sizes are constants in the first program for a structure, then symbols.
        is_dynamic = any(entry.facts.structure == facts.structure for entry in self.entries)
        try:
            entry = self._build(facts, leaves, is_dynamic=is_dynamic)
        except StaticNeeded:
            entry = self._build(facts, leaves, is_dynamic=False)
        self.entries.insert(0, entry)
        return entry.program

    def _build(self, facts: Facts, leaves: Sequence[Any], *, is_dynamic: bool) -> GuardedProgram:
        state, inputs, arguments = private.GlobalStateGuard(), Inputs(Fakes(), is_dynamic), list(leaves)
        with record_compilation(Recording(self.graph, self.reason, tuple(leaves), self.graph)):
            inputs.add_arguments(arguments)
            function = CapturedFunction(self.call, self._differentiate)
            program = build_program(function, inputs, arguments, self.backend)
            gradients = tuple(f"gradient {n}" for n in range(1, len(arguments) - len(self.names) + 1))
            program.names = self.names + gradients
        offsets = offsets_of(leaves) if inputs.fakes.offsets_matter else None
        guards = size_guards(inputs.fakes) if is_dynamic else None
        return GuardedProgram(program, facts, state, _modes(), offsets, guards)

    def _differentiate(self, fn: Callable[[list[Any]], Any]) -> Specialized:
        return Specialized(fn, self.backend, "a further derivative", self.graph, self.names)


__all__ = ["Facts", "Specialized", "facts_of", "offsets_of"]
