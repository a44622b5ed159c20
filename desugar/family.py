"""The backwards of one program: a family keyed by which results get a gradient, written when first met.

A member is compiled then too, or ahead of that (:mod:`desugar.overlap`). For gradients of the kind that was
traced, it runs a compiled graph against what the forward saved: the whole backward graph, or what is left of
it when some gradients do not arrive. Anything else (a gradient of another type or metadata, a backward that
is to be differentiated itself) is computed by differentiating the function again, from the arguments of the
call: `torch.autograd.grad` over the function is a function like any other, and the pass compiles it. Its own
gradients are right to any order, for autograd itself wrote them.

The arguments are not kept alive for that, since eager mode would not keep all of them either. What the forward
saved anyway comes from there, a leaf from the autograd graph, the rest by weak reference.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from desugar import _torch as private, compilers
from desugar.backward import (
    BackwardPlan,
    Member,
    MemberEmitter,
    differentiable_leaves,
    member_name,
    sources_of_saved,
)
from desugar.check import check_pruned
from desugar.compilers import Backend, CompiledGraph, GraphKind
from desugar.direct import call_directly
from desugar.errors import DesugarError
from desugar.files import WRAPPER_FILE, forget_with, graph_texts
from desugar.graphs import copy_graph, first_random, output_nodes
from desugar.inputs import Inputs
from desugar.listening import stage
from desugar.memory import base_of
from desugar.modes import autocast_state, entering, is_autocast
from desugar.overlap import Ahead
from desugar.partition import BackwardInput, FromTangent, Partitioned
from desugar.prune import prune_missing
from desugar.refuse import check_first_order
from desugar.runtime import are_batched
from desugar.trace import Call, Traced
from desugar.trees import result_leaves
from desugar.values import Constant, Plain, Same, View, Wrapper, slots_of
from subclasses.build import build_functions
from subclasses.emit import Emitter

Backward = Callable[..., tuple[Any, ...]]
CompileAgain = Callable[[Callable[..., Any]], Callable[..., Any]]

# ------------------------------------------------------------------------------------------------- records


@dataclass(frozen=True, slots=True)
class Again:
    """What it takes to differentiate the function again.

    Attributes:
        call: The function, from argument leaves to its result.
        compile: Compiles a function that computes gradients.
    """

    call: Call
    compile: CompileAgain


@dataclass(frozen=True, slots=True)
class Watched:
    """Input leaves that the forward notes for another differentiation.

    Attributes:
        referred: Argument leaves that are neither saved nor in the autograd graph: a weak reference.
        held: Those of them that are held if they are no leaves, for eager mode holds what leads to them.
        versioned: Leaves that the saved values were computed from and that are not saved: their version.
        numbers: Slots of ints that are arguments.
    """

    referred: tuple[int, ...]
    held: frozenset[int]
    versioned: tuple[int, ...]
    numbers: tuple[int, ...]


class Members(dict[tuple[bool, ...], Backward]):
    """Presence of each gradient -> the generated function; built when first asked for."""

    def __init__(self, build: Callable[[tuple[bool, ...]], Backward]) -> None:
        super().__init__()
        self.build = build

    def __missing__(self, present: tuple[bool, ...]) -> Backward:
        return self.build(present)


# --------------------------------------------------------------------------------------------- the family


class Family:
    """All backwards of one program.

    Attributes:
        partitioned: Forward and backward graphs as they were split.
        members: The generated functions so far.
        sources: Their texts.
        late_seconds: How long they took to compile when they were first needed.
        plan: What the forward saves; set when its text is written.
        function: The autograd function whose `backward` asks for members.
        is_replacing: Whether the member for all gradients takes the place of that `backward`, as it can where both
            have the same parameters: it is what nearly every call needs. Set when the function's text is written.
    """

    def __init__(
        self, inputs: Inputs, traced: Traced, partitioned: Partitioned, backend: Backend, again: Again
    ) -> None:
        self.inputs, self.traced, self.partitioned = inputs, traced, partitioned
        self.backend, self.again = backend, again
        self.members = Members(self._build)
        self.sources: list[str] = []
        self.late_seconds = 0.0
        self.plan = BackwardPlan()
        self.function: type[torch.autograd.Function] | None = None
        self.is_replacing = False
        self.constants: dict[int, Any] = {}
        self.autocast = autocast_state()
        self._watched = Watched((), frozenset(), (), ())
        self._random = first_random(partitioned.forward)
        self._ahead = Ahead()
        self._recompiled: dict[tuple[int, ...], Callable[..., Any]] = {}
        self._lock = threading.RLock()

    def compile_ahead(self, present: tuple[bool, ...]) -> None:
        """Compiles a member now; its first call waits for its kernels."""
        if any(present) and not self._type_depends_on(present):
            graph = self._graph(present)
            with self.backend.postpone(graph) as kernels:
                compiled = self._compile(graph)
            self._ahead.put(present, compiled, kernels)

    # ............................................................................................ members

    @private.disable_dynamo  # compiled autograd may be tracing, and would trace the compiler
    def _build(self, present: tuple[bool, ...]) -> Backward:
        with (
            private.compile_lock,
            self._lock,
            private.use_lazy_graph_module(True),
            private.without_functorch(),
        ):
            if present in self.members:
                return self.members[present]
            function = self._build_again() if self._type_depends_on(present) else self._build_member(present)
            self.members[present] = function
            if self.function is not None and self.is_replacing and present and all(present):
                self.function.backward = staticmethod(function)  # type: ignore[method-assign]
            return function

    def _build_again(self) -> Backward:
        return lambda ctx, *tangents: self.differentiate(ctx, tangents)

    def _build_member(self, present: tuple[bool, ...]) -> Backward:
        known = graph_texts()
        graph = self._graph(present)
        compiled = None
        if any(present):
            with self._timed():
                compiled = self._ahead.take(present) or self._compile_late(graph)
        out = Emitter()
        name = member_name(present)
        out.reserve("ctx", "saved", "_", name, *(f"tangent{number}" for number, _ in self.traced.tangents))
        emitter = self.emitter(out, present)
        emitter.emit(Member(name, present, graph, self._sources(graph), compiled))
        functions = build_functions(out.source, out.namespace, filename=WRAPPER_FILE, owner=self)
        if not self.inputs.checked_by_others:
            call_directly(functions[name])
        self.sources.append(out.source)
        forget_with(self, graph_texts() - known)
        return functions[name]  # type: ignore[return-value]

    def emitter(self, out: Emitter, present: tuple[bool, ...]) -> MemberEmitter:
        """Writes the text of one member."""
        other = out.bind(
            *(
                (self.otherwise, "another_backward")
                if all(present)
                else (self.differentiate, "differentiate_again")
            )
        )
        return MemberEmitter(
            out,
            self.traced,
            self.plan,
            other,
            autocast=is_autocast(self.autocast),
            reads_memory=self.backend.reads_memory,
        )

    def otherwise(self, ctx: Any, tangents: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the member for all gradients does not take: some do not arrive, or they are of another kind."""
        present = tuple(tangent is not None for tangent in tangents)
        return self.differentiate(ctx, tangents) if all(present) else self.members[present](ctx, *tangents)

    def _graph(self, present: tuple[bool, ...]) -> fx.GraphModule:
        if all(present):
            return self.partitioned.backward
        names = self._source_names()
        tangents = {name: source.index for name, source in names.items() if isinstance(source, FromTangent)}
        graph = prune_missing(
            self.partitioned.backward, tangents, self._missing(present), list(self.partitioned.depends)
        )
        check_pruned(graph, names)
        return graph

    def _missing(self, present: tuple[bool, ...]) -> frozenset[int]:
        return frozenset(
            slot
            for (_, value), there in zip(self.traced.tangents, present, strict=True)
            if not there
            for slot in slots_of(value)
        )

    def _source_names(self) -> dict[str, BackwardInput]:
        placeholders = self.partitioned.backward.graph.find_nodes(op="placeholder")
        return {
            n.name: source for n, source in zip(placeholders, self.partitioned.backward_inputs, strict=True)
        }

    def _sources(self, graph: fx.GraphModule) -> tuple[BackwardInput, ...]:
        names = self._source_names()
        return tuple(names[node.name] for node in graph.graph.find_nodes(op="placeholder"))

    def _compile(self, graph: fx.GraphModule) -> CompiledGraph:
        sources = self._sources(graph)
        saved = tuple(n for n, source in enumerate(sources) if not isinstance(source, FromTangent))
        kind = GraphKind("backward", len(output_nodes(graph)), saved)
        return compilers.compile_backward(self.backend, copy_graph(graph), kind, self.inputs.fakes.mode)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        with stage("compile backward"):
            yield
        self.late_seconds += time.perf_counter() - start

    def _compile_late(self, graph: fx.GraphModule) -> CompiledGraph:
        """Compiles when the signature is settled: a graph that would need more of it runs as it is."""
        env = self.inputs.fakes.env
        known = len(env.guards)
        compiled = self._compile(graph)
        if len(env.guards) == known:
            return compiled
        return compilers.run_as_is(graph)

    def _type_depends_on(self, present: tuple[bool, ...]) -> bool:
        """Whether a plain argument's gradient is a subclass only because of a gradient that does not arrive."""
        arriving, missing = set[int](), set[int]()
        for (_, value), there in zip(self.traced.tangents, present, strict=True):
            if isinstance(value, Wrapper):
                (arriving if there else missing).update(slots_of(value))
        for leaf, value in self.traced.grads:
            if isinstance(self.inputs.values[leaf], Plain) and isinstance(value, Wrapper):
                feeding = frozenset().union(*(self.partitioned.depends[slot] for slot in slots_of(value)))
                if feeding & missing and not feeding & arriving:
                    return any(present)
        return False

    # ................................................................................. differentiating again

    def watch(self, leaves: list[Any]) -> Watched:
        """What the forward is to note; `leaves` are the argument leaves that were traced."""
        values, captured = self.inputs.values, self.inputs.captured
        self.constants = {n: leaf for n, leaf in enumerate(leaves) if isinstance(values[n], Constant)}
        differentiable = set(differentiable_leaves(self.traced))
        live = [*leaves, *captured]
        sources = sources_of_saved(self.inputs, self.partitioned)
        tensors = [n for n in tensor_leaves(self.inputs) if n not in self.plan.leaves]
        found_in_graph = {n for n in differentiable if isinstance(live[n], nn.Parameter)}
        self._watched = Watched(
            tuple(n for n in tensors if n < len(leaves) and n not in found_in_graph),
            frozenset(differentiable & sources),
            tuple(n for n in tensors if n in sources and not live[n].is_inference()),
            tuple(v.index for v in values if isinstance(v, Constant) and v.index is not None),
        )
        return self._watched

    def differentiate(self, ctx: Any, tangents: tuple[Any, ...]) -> tuple[Any, ...]:
        """The gradients by differentiating the function again, for gradients of any kind.

        Raises:
            DesugarError: The call cannot be repeated: it draws random numbers, or an argument is gone or was
                changed since.
        """
        if self._random is not None:
            raise DesugarError(
                f"this backward has to run the function again, which would draw other random numbers ({self._random})",
                instead="pass gradients of the results' own types and, for second derivatives, run it in eager mode",
            )
        if self.traced.outputs.has_effects:
            raise DesugarError(
                "this backward has to run the function again, which would write to its arguments again",
                instead="return new values from the function instead of writing in place",
            )
        leaves = self._recover(ctx)
        numbers = [number for number, _ in self.traced.tangents]
        present = tuple(n for n, tangent in zip(numbers, tangents, strict=True) if tangent is not None)
        given = tuple(tangent for tangent in tangents if tangent is not None)
        if are_batched(given):  # nothing compiled takes them
            with entering(self.autocast):
                return None, None, *self._gradients_of(present)(leaves, given)
        with self._lock:
            again = self._recompiled.get(present)
            if again is None:
                again = self._recompiled[present] = self.again.compile(self._gradients_of(present))
        with entering(self.autocast):
            return None, None, *again(leaves, given)

    def _gradients_of(self, present: tuple[int, ...]) -> Callable[..., Any]:
        """The function from argument leaves and gradients of results to gradients of arguments."""
        call, captured = self.again.call, self.inputs.captured
        wanted, num_arguments = differentiable_leaves(self.traced), self.inputs.num_arguments
        # What hidden results are: the bases of views that the user sees.
        bases = {
            value.index: n
            for n, value in enumerate(self.traced.outputs.visible)
            if isinstance(value, View) and value.of == "output" and not value.detached
        }

        def gradients(leaves: list[Any], tangents: tuple[Any, ...]) -> tuple[Any, ...]:
            twice = torch.is_grad_enabled()
            with torch.enable_grad():
                results = dict(enumerate(result_leaves(call(leaves))))
                results |= {base: base_of(results[n]) for base, n in bases.items() if base not in results}
                if twice:
                    check_first_order(results.values())
                return torch.autograd.grad(
                    [results[number] for number in present],
                    [leaves[n] if n < num_arguments else captured[n - num_arguments] for n in wanted],
                    tangents,
                    allow_unused=True,
                    create_graph=twice,
                )

        return gradients

    def _recover(self, ctx: Any) -> list[Any]:
        """The argument leaves of the call, as they were."""
        watched = self._watched
        saved = ctx.saved_tensors if self.plan.saved else ()
        leaves: list[Any] = []
        for n, value in enumerate(self.inputs.values[: self.inputs.num_arguments]):
            match value:
                case Same(_, index):
                    leaves.append(leaves[index])
                case Constant(_, int(index)):
                    leaves.append(ctx.numbers[watched.numbers.index(index)])
                case Constant():
                    leaves.append(self.constants[n])
                case _:
                    leaves.append(self._recover_tensor(n, ctx, saved))
        live = [*leaves, *self.inputs.captured]
        for n, version in zip(watched.versioned, getattr(ctx, "versions", ()), strict=True):
            if live[n]._version != version:
                raise DesugarError(
                    f"this backward has to run the function again, and a tensor of size {tuple(live[n].shape)} "
                    "that it read was changed in place since",
                    instead="change it after the backward, or change a clone",
                )
        return leaves

    def _recover_tensor(self, n: int, ctx: Any, saved: Sequence[Any]) -> Any:
        """Argument leaf `n`: as saved, or if it is still there, or from the autograd graph, where leaves live on."""
        if n in self.plan.leaves:
            return saved[self.plan.leaves[n]]
        referred, differentiable = self._watched.referred, differentiable_leaves(self.traced)
        leaf = ctx.alive[referred.index(n)] if n in referred else None
        leaf = leaf() if isinstance(leaf, weakref.ref) else leaf
        if leaf is None and n in differentiable:
            leaf = getattr(ctx.next_functions[differentiable.index(n)][0], "variable", None)
        if leaf is None:
            raise DesugarError(
                f"this backward has to run the function again, and its argument {n} is gone",
                instead="keep the arguments until the backward has run",
            )
        return leaf


# ------------------------------------------------------------------------------------------------- helpers


def tensor_leaves(inputs: Inputs) -> list[int]:
    """Input leaves that are tensors."""
    return [n for n, value in enumerate(inputs.values) if isinstance(value, Plain | Wrapper)]
