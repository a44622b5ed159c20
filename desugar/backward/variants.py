"""Builds the backwards of one program: one variant for each set of results whose gradients arrive.

A variant is generated when its set of gradients first arrives. It is compiled then, or earlier
(:mod:`desugar.backends.inductor_patches`). For gradients of the traced types, a variant runs a compiled graph on the
saved values: the backward graph for all gradients, or a pruned graph if some do not arrive.

:mod:`desugar.backward.recompute` runs the function again in three cases:

- A gradient has another type or other metadata.
- The backward is itself differentiated.
- Some gradients do not arrive, and pruning could give wrong gradients (`BackwardVariants._needs_recompute`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, fx

from desugar import _torch as torch_private
from desugar.backends.base import Backend, CompiledGraph, GraphKind, run_eagerly
from desugar.backends.inductor_patches import PendingKernels
from desugar.backward.emit import BackwardPlan, Variant, VariantEmitter, variant_name
from desugar.backward.recompute import CapturedFunction, Recompute
from desugar.codegen.direct_calls import call_directly, replace_backward
from desugar.ir.abstract_values import same_ints
from desugar.ir.fx_utils import (
    copy_graph,
    fake_inputs,
    output_items,
    output_nodes,
    set_outputs,
    tangent_dependencies,
)
from desugar.ir.stages import BackwardInput, CompiledGraphs, FromTangent, Interface
from desugar.ir.values import Plain, Wrapper, slots_of
from desugar.passes.verify import check_pruned
from desugar.recording.graph_text import WRAPPER_FILE, forget_with, graph_texts
from desugar.recording.listeners import stage
from desugar.store.programs import ProgramCache
from desugar.tracing.tangents import may_differ_without
from subclasses.slow_paths import say_once
from subclasses.source_text.build import build_functions
from subclasses.source_text.emitter import Emitter

Backward = Callable[..., tuple[Any, ...]]


class VariantTable(dict[tuple[bool, ...], Backward]):
    """Presence of each gradient -> the variant's function; builds the function on first access."""

    def __init__(self, build: Callable[[tuple[bool, ...]], Backward]) -> None:
        super().__init__()
        self.build = build

    def __missing__(self, present: tuple[bool, ...]) -> Backward:
        return self.build(present)


# ------------------------------------------------------------------------------------------- the variants


class BackwardVariants:
    """All backwards of one program.

    Attributes:
        spec: The description of the program.
        interface: How the inputs and outputs of the joint graph map to argument and result leaves.
        partition: The inputs and outputs of the forward and the backward.
        load_graphs: Returns the plain graphs; a stored program loads them at the first call.
        mode: The fake mode of the graphs, with their shape environment.
        backend: Compiles the graphs.
        plan: The values that the forward saves and records.
        cache: Where compiled backwards are stored; None if they are not.
        recompute: Computes gradients by running the function again.
        table: The variants' functions so far.
        texts: The texts of the generated functions.
        late_seconds: The time in seconds spent on compiling variants when they were first needed.
        function: The autograd function whose `backward` looks up variants; set when its text is built.
        is_direct: Whether variants call the code inside their graphs (:mod:`desugar.codegen.direct_calls`).
        functions: The generated functions.
    """

    def __init__(
        self,
        compiled: CompiledGraphs,
        plan: BackwardPlan,
        backend: Backend,
        mode: Any,
        captured: CapturedFunction,
        cache: ProgramCache | None = None,
    ) -> None:
        assert compiled.spec.split is not None
        self.spec, self.load_graphs, self.mode = compiled.spec, compiled.graphs, mode
        self.interface, self.partition = compiled.spec.interface, compiled.spec.split
        self.backend, self.plan, self.cache = backend, plan, cache
        self.recompute = Recompute(compiled, plan, captured)
        self.table = VariantTable(self._build)
        self.texts: list[str] = []
        self.late_seconds = 0.0
        self.function: type[torch.autograd.Function] | None = None
        self.is_direct = False
        self.functions: list[Backward] = []
        self._ahead: dict[tuple[bool, ...], tuple[CompiledGraph, PendingKernels]] = {}
        self._lock = threading.RLock()

    def compile_ahead(self, present: tuple[bool, ...]) -> None:
        """Compiles the graph of a variant now; the variant's first call waits for the kernels."""
        if self.uses_graph(present):
            graph = self._graph(present)
            with self.backend.postpone(graph) as kernels:
                compiled = self._compile(graph)
            self._ahead[present] = compiled, kernels

    def call_directly(self) -> None:
        """Makes variants call the code inside their graphs; the program's caller checks for profilers."""
        self.is_direct = True
        for function in self.functions:
            call_directly(function)

    # ............................................................................................ variants

    @torch_private.disable_dynamo  # compiled autograd may be tracing, and would trace the compiler
    def _build(self, present: tuple[bool, ...]) -> Backward:
        with (
            torch_private.compile_lock,
            self._lock,
            torch_private.use_lazy_graph_module(True),
            torch_private.without_functorch(),
        ):
            if present in self.table:
                return self.table[present]
            function = self._run_recompute if self._needs_recompute(present) else self._build_variant(present)
            self.table[present] = function
            if self.function is not None and self.plan.is_replaced and present and all(present):
                replace_backward(self.function, function)
            return function

    def _run_recompute(self, ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        return self.recompute(ctx, tangents)

    def _build_variant(self, present: tuple[bool, ...]) -> Backward:
        known = graph_texts()
        compiled = None
        if any(present):
            start = time.perf_counter()
            with stage("compile backward"):
                compiled = self._load_or_compile(present)
            self.late_seconds += time.perf_counter() - start
        out = Emitter()
        name = variant_name(present)
        out.reserve("ctx", "saved", "_", name, *(f"tangent{number}" for number, _ in self.interface.tangents))
        emitter = self.emitter(out, present)
        emitter.emit(self.describe(present, compiled))
        functions = build_functions(out.source, out.namespace, filename=WRAPPER_FILE, owner=self)
        self.functions.append(functions[name])
        if self.is_direct:
            call_directly(functions[name])
        self.texts.append(out.source)
        forget_with(self, graph_texts() - known)
        return functions[name]  # type: ignore[return-value]

    def uses_graph(self, present: tuple[bool, ...]) -> bool:
        """Returns whether a compiled graph handles this set of arriving gradients."""
        return any(present) and not self._needs_recompute(present)

    def describe(self, present: tuple[bool, ...], compiled: CompiledGraph | None) -> Variant:
        """Returns the description of the variant for the gradients that arrive."""
        if all(present):
            whole = self.partition
            return Variant(present, whole.backward_inputs, whole.backward_items, whole.gradients, compiled)
        graph = self._graph(present)
        return Variant(
            present, self._backward_inputs(graph), tuple(fake_inputs(graph)), output_items(graph), compiled
        )

    def _load_or_compile(self, present: tuple[bool, ...]) -> CompiledGraph:
        if self.cache is not None and (
            stored := self.cache.load_backward(present, lambda: self._graph(present))
        ):
            return stored
        env = self.mode.shape_env
        num_guards = len(env.guards)
        compiled, kernels = self._ahead.pop(present, (None, None))
        if compiled is None or kernels is None or not kernels.are_ready():
            compiled = self._compile_late(self._graph(present))
        if self.cache is not None and len(env.guards) == num_guards:
            self.cache.save_backward(present, compiled)
        return compiled

    def emitter(self, out: Emitter, present: tuple[bool, ...]) -> VariantEmitter:
        """Returns the emitter of one variant."""
        on_mismatch = (
            (self.run_another, "another_backward") if all(present) else (self.recompute, "recompute")
        )
        return VariantEmitter(
            out,
            self.interface,
            self.plan,
            out.bind(*on_mismatch),
            autocast=self.spec.is_autocast,
            reads_memory=self.backend.reads_memory,
        )

    def run_another(self, ctx: Any, tangents: tuple[Any, ...]) -> tuple[Any, ...]:
        """Runs a backward that the variant for all gradients rejects.

        If some gradients do not arrive, another variant runs; otherwise the function is run again.
        """
        present = tuple(tangent is not None for tangent in tangents)
        return self.recompute(ctx, tangents) if all(present) else self.table[present](ctx, *tangents)

    @property
    def _whole(self) -> fx.GraphModule:
        """The backward for all gradients."""
        return self.load_graphs().backward  # type: ignore[return-value]

    def _graph(self, present: tuple[bool, ...]) -> fx.GraphModule:
        if all(present):
            return self._whole
        names = self._source_names()
        tangents = {name: source.index for name, source in names.items() if isinstance(source, FromTangent)}
        graph = prune_missing(self._whole, tangents, self._missing(present), self._gradient_dependencies())
        check_pruned(graph, names)
        return graph

    def _gradient_dependencies(self) -> list[frozenset[int]]:
        """Returns, for each output, the tangent slots on which any part of its gradients depends.

        A gradient of a class arrives with all its inner tensors, which may be zeros, or not at all.
        """
        depends = list(self.partition.depends)
        for _, value in self.interface.grads:
            slots = [] if value is None else [*slots_of(value)]
            whole = frozenset().union(*(self.partition.depends[slot] for slot in slots))
            for slot in slots:
                depends[slot] |= whole
        return depends

    def _missing(self, present: tuple[bool, ...]) -> frozenset[int]:
        """Returns the tangent slots that do not arrive."""
        return frozenset(
            slot
            for (_, value), is_present in zip(self.interface.tangents, present, strict=True)
            if not is_present
            for slot in slots_of(value)
        )

    def _source_names(self) -> dict[str, BackwardInput]:
        placeholders = self._whole.graph.find_nodes(op="placeholder")
        return {
            n.name: source for n, source in zip(placeholders, self.partition.backward_inputs, strict=True)
        }

    def _backward_inputs(self, graph: fx.GraphModule) -> tuple[BackwardInput, ...]:
        names = self._source_names()
        return tuple(names[node.name] for node in graph.graph.find_nodes(op="placeholder"))

    def _compile(self, graph: fx.GraphModule) -> CompiledGraph:
        sources = self._backward_inputs(graph)
        saved = tuple(n for n, source in enumerate(sources) if not isinstance(source, FromTangent))
        kind = GraphKind("backward", len(output_nodes(graph)), saved)
        return self.backend.compile(copy_graph(graph), kind, self.mode)[0]

    def _compile_late(self, graph: fx.GraphModule) -> CompiledGraph:
        """Compiles a graph after Dynamo has built its guards; a graph that needs further guards runs op by op."""
        env = self.mode.shape_env
        num_guards = len(env.guards)
        compiled = self._compile(graph)
        if len(env.guards) == num_guards:
            return compiled
        say_once(
            "a backward runs op by op, since its graph assumes sizes that no guard of the forward checks",
            "compile with dynamic=False, or use all results of the function",
            "desugar",
        )
        return run_eagerly(graph)

    def _needs_recompute(self, present: tuple[bool, ...]) -> bool:
        """Whether pruning the full backward could give wrong gradients, so that the function is differentiated again.

        There are two such cases. A custom `torch.autograd.Function` may compute other gradients where one of its own
        is None. The gradient of a plain argument may be a subclass only because of a missing gradient.
        """
        if not any(present) or all(present):
            return False
        missing = self._missing(present)
        return may_differ_without(self.interface.calls, missing) or self._has_other_gradient_type(present)

    def _has_other_gradient_type(self, present: tuple[bool, ...]) -> bool:
        """Whether a plain argument's gradient is a subclass only because of a gradient that does not arrive."""
        arriving, missing = set[int](), set[int]()
        for (_, value), is_present in zip(self.interface.tangents, present, strict=True):
            if isinstance(value, Wrapper):
                (arriving if is_present else missing).update(slots_of(value))
        for leaf, value in self.interface.grads:
            if isinstance(self.spec.inputs.values[leaf], Plain) and isinstance(value, Wrapper):
                depends = frozenset().union(*(self.partition.depends[slot] for slot in slots_of(value)))
                if depends & missing and not depends & arriving:
                    return True
        return False


def expected_tangents(interface: Interface) -> tuple[bool, ...]:
    """Predicts, per tangent, whether it will arrive.

    Results without dimensions are assumed to be losses, whose gradients arrive. Without such a result, all gradients
    are expected.
    """
    dims = [
        len(value.size) if isinstance(value, Wrapper) else interface.tangent_items[value.index].dim()  # type: ignore[union-attr]
        for _, value in interface.tangents
    ]
    losses = tuple(dim == 0 for dim in dims)
    return losses if any(losses) else (True,) * len(losses)


# -------------------------------------------------------------------------------------------------- pruning


def prune_missing(
    backward: fx.GraphModule,
    tangents: dict[str, int],
    missing: Collection[int],
    depends: list[frozenset[int]],
) -> fx.GraphModule:
    """Returns a copy of the backward graph without the computations that depend on missing tangents only.

    Autograd formulas are linear in the incoming gradients, and eager mode does not run formulas that no gradient
    reaches. So a value computed only from missing tangents is zero. Pruning removes additions of such values, and then
    the nodes and the input tensors without users. An output becomes None if it depends on tangents and none arrives.

    Args:
        backward: The graph for all tangents.
        tangents: Placeholder name -> tangent slot.
        missing: The tangent slots that do not arrive.
        depends: Per output, the tangent slots that it depends on.
    """
    graph = copy_graph(backward)
    behind, gone = tangent_dependencies(graph, tangents), frozenset(missing)
    zeros = {node for node, slots in behind.items() if slots and slots <= gone}
    for node in list(graph.graph.nodes):
        if node not in zeros and node.target is torch.ops.aten.add.Tensor and not node.kwargs:
            _drop_zero_summand(node, zeros)
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default  # a summand may have other strides than the sum had
    outputs = [
        node if not depends[n] or depends[n] - gone else None for n, node in enumerate(output_nodes(graph))
    ]
    set_outputs(graph, outputs)
    for node in reversed(graph.graph.find_nodes(op="placeholder")):
        if not node.users and isinstance(node.meta["val"], Tensor):
            graph.graph.erase_node(
                node
            )  # an int may be in the size of another input, which the compiler reads
    graph.recompile()
    return graph


def _drop_zero_summand(node: fx.Node, zeros: Collection[fx.Node]) -> None:
    left, right = node.args[:2]
    for zero, other in ((left, right), (right, left)):
        if zero in zeros and isinstance(other, fx.Node) and _has_same_type(node, other):
            node.replace_all_uses_with(other)
            return


def _has_same_type(one: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes hold tensors of the same size and dtype."""
    a, b = (n.meta.get("val") for n in (one, other))
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and a.dtype == b.dtype
        and same_ints(a.size(), b.size())
    )
