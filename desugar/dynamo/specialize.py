"""A function of flat leaves, with a program for the facts of each call that Dynamo has not looked at.

Two kinds of calls come here: of a graph whose arguments share memory in a way that Dynamo does not guard, and of a
function that differentiates another one. Both are rare, so their facts are compared in Python.
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
from desugar.frontend.fakes import Fakes, SizeGuards, size_guards
from desugar.frontend.inputs import Inputs, StaticNeeded
from desugar.ir.storage import storage_of
from desugar.ir.values import dynamic_names, inner_names, is_wrapper
from desugar.pipeline import build_program
from desugar.program import Program
from desugar.recording.listeners import Recording
from desugar.recording.trace_artifacts import record_compilation
from desugar.wrapper.recompute import Again

MAX_PROGRAMS = 64  # calls with other facts run the function itself

# ---------------------------------------------------------------------------------------------------- facts


@dataclass(frozen=True, slots=True)
class Facts:
    """What a program may depend on, of the leaves of one call.

    Attributes:
        structure: Types, layouts, dtypes, devices, constants; which tensors are one, and where they share memory.
        extents: Sizes, strides and dynamic ints.
    """

    structure: tuple[Any, ...]
    extents: tuple[Any, ...]


def facts_of(leaves: Sequence[Any]) -> Facts:
    """The facts of a call."""
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
    names, context = inner_names(leaf)
    structure.append((names, context))
    extents.append(tuple(getattr(leaf, name) for name in dynamic_names(type(leaf))))
    for name in names:
        _add_leaf(getattr(leaf, name), structure, extents, plain)


def _shared_memory(tensors: Sequence[Tensor]) -> Iterator[Any]:
    """Which storage each tensor lies in, and for storages with several of them where."""
    storages = [storage_of(tensor) for tensor in tensors]
    for tensor, storage in zip(tensors, storages, strict=True):
        if storages.count(storage) > 1:
            nbytes = tensor.untyped_storage().nbytes()
            yield storages.index(storage), tensor.storage_offset(), tensor.size(), tensor.stride(), nbytes
        else:
            yield None


# ------------------------------------------------------------------------------------------------- programs


@dataclass(frozen=True, slots=True)
class Entry:
    """A program and the calls that it is for."""

    program: Program
    facts: Facts
    state: Any
    modes: tuple[Any, ...]
    offsets: tuple[int, ...] | None
    guards: SizeGuards | None  # None where the sizes are constants

    def fits(self, facts: Facts, leaves: Sequence[Any]) -> bool:
        """Whether the program is for this call."""
        if facts.structure != self.facts.structure or not self.state.check() or _modes() != self.modes:
            return False
        if self.offsets is not None and self.offsets != offsets_of(leaves):
            return False
        return facts.extents == self.facts.extents if self.guards is None else self.guards.hold(leaves)


def _modes() -> tuple[Any, ...]:
    """Modes that the C++ check of the global state does not look at."""
    return torch.is_inference_mode_enabled(), private.num_function_modes()


def offsets_of(leaves: Sequence[Any]) -> tuple[int, ...]:
    """The storage offsets of all plain tensors."""
    found: list[int] = []
    for leaf in leaves:
        if is_wrapper(leaf):
            found += offsets_of([getattr(leaf, name) for name in inner_names(leaf)[0]])
        elif isinstance(leaf, Tensor):
            found.append(int(leaf.storage_offset()))
    return tuple(found)


class Specialized:
    """A function from flat leaves to a tuple, compiled for the facts of each call.

    Attributes:
        call: The function: takes a list of leaves, and depends on nothing else.
        backend: What compiles its graphs.
        reason: Why it is compiled, for reports.
        graph: The graph of Dynamo's that it runs or differentiates.
        names: What the user calls the arguments of the graph, with which the leaves begin.
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
        self.entries: list[Entry] = []
        self._lock = threading.RLock()

    def __call__(self, *leaves: Any) -> tuple[Any, ...]:
        """Runs the program for these leaves, compiled now if there is none yet."""
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
        seen = any(entry.facts.structure == facts.structure for entry in self.entries)
        try:
            entry = self._build(facts, leaves, is_dynamic=seen)
        except StaticNeeded:
            entry = self._build(facts, leaves, is_dynamic=False)
        self.entries.insert(0, entry)
        return entry.program

    def _build(self, facts: Facts, leaves: Sequence[Any], *, is_dynamic: bool) -> Entry:
        state, inputs, live = private.GlobalStateGuard(), Inputs(Fakes(), is_dynamic), list(leaves)
        with record_compilation(Recording(self.graph, self.reason, tuple(leaves), self.graph)):
            inputs.add_arguments(live)
            program = build_program(Again(self.call, self._differentiate), inputs, live, self.backend)
            more = tuple(f"gradient {n}" for n in range(1, len(live) - len(self.names) + 1))
            program.names = self.names + more
        offsets = offsets_of(leaves) if inputs.fakes.offsets_matter else None
        guards = size_guards(inputs.fakes) if is_dynamic else None
        return Entry(program, facts, state, _modes(), offsets, guards)

    def _differentiate(self, fn: Callable[[list[Any]], Any]) -> Specialized:
        return Specialized(fn, self.backend, "a further derivative", self.graph, self.names)


__all__ = ["Facts", "Specialized", "facts_of", "offsets_of"]
