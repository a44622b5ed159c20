"""Plans what the forward of a program saves for its backwards, and emits these.

A program has one variant of its backward for each set of results whose gradients arrive. All variants share a
`BackwardPlan`, which is made together with the forward: the objects that the forward saves, and the expressions by
which a backward reads its inputs. A variant checks that the gradients match the traced gradients, reads its inputs,
calls its compiled graph and builds the gradients of the arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from desugar.backends.base import CompiledGraph
from desugar.codegen.build_values import emit_constant, emit_graph_call, emit_value, zeros_expression
from desugar.codegen.debug_checks import emit_recheck, expect_plain
from desugar.codegen.runtime import placed, restride, settle, tensor_guards
from desugar.codegen.text import block, join_saved, targets_of, tuple_of
from desugar.codegen.unpack import Names
from desugar.ir.abstract_values import hint, is_symbolic
from desugar.ir.stages import (
    BackwardInput,
    FromForward,
    FromInput,
    FromTangent,
    Interface,
    PartitionSpec,
    ProgramSpec,
    presence_bits,
)
from desugar.ir.values import Constant, Plain, Value, Wrapper, parts_of, paths_of, take_apart
from desugar.recording.listeners import note_skipped_check
from subclasses import TensorSubclass
from subclasses.handwritten import DTensorContext, OpaqueContext
from subclasses.layout import cotangent_layout, value_layout
from subclasses.source_text.emitter import Emitter
from subclasses.spec.values import is_differentiable

# ------------------------------------------------------------------------------------------------- the plan


@dataclass(slots=True)
class BackwardPlan:
    """The values that the forward saves or records, and how a backward reads them.

    Attributes:
        saved: Expressions in the forward of the objects passed to `save_for_backward`.
        others: Expressions in the forward of the other objects that a backward reads: ints, and sizes of results whose
            gradients may not arrive. Also non-differentiable inner tensors that a gradient shares with its result.
        leaves: Input leaf -> index in `saved`, for leaves that are saved themselves.
        inner: (input leaf, attribute path, index in `saved`) of each inner tensor of an input that is saved.
        reads: Backward input -> expression in the backward.
        size_reads: Tangent slot -> expression of its size in the backward.
        companion_reads: (result leaf, attribute path) -> expression of a companion in the backward.
        referred: Argument leaves that are neither saved nor in the autograd graph. The forward references them weakly,
            for a backward that runs the function again (:mod:`desugar.backward.recompute`).
        strong_unless_leaf: Input leaves that are referenced strongly if they are non-leaves of autograd: eager mode
            keeps their history alive, too.
        strong: Input leaves that are referenced strongly in any case. These are all, if a result may get plain
            gradients where gradients of its class were traced. Else they are tensors without dimensions, which Dynamo
            makes of floats at each call.
        versioned: Input leaves that are not saved but from which a saved value is computed; their version counters
            are recorded.
        numbers: Input slot -> index in `others`, for the arguments that are symbolic numbers.
        is_replaced: Whether the variant for all gradients replaces the `backward` of the autograd function. It can if
            both have the same parameters. Nearly every call needs this variant.
    """

    saved: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    leaves: dict[int, int] = field(default_factory=dict)
    inner: list[tuple[int, tuple[str, ...], int]] = field(default_factory=list)
    reads: dict[BackwardInput, str] = field(default_factory=dict)
    size_reads: dict[int, str] = field(default_factory=dict)
    companion_reads: dict[tuple[int, tuple[str, ...]], str] = field(default_factory=dict)
    referred: list[int] = field(default_factory=list)
    strong_unless_leaf: set[int] = field(default_factory=set)
    strong: set[int] = field(default_factory=set)
    versioned: list[int] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    is_replaced: bool = False

    def save(self, source: BackwardInput, obj: str) -> int:
        """Saves an object that is a backward input; returns its index in `saved`."""
        index = self.keep(obj)
        self.reads[source] = f"saved[{index}]"
        return index

    def keep(self, obj: str) -> int:
        """Saves an object; returns its index in `saved`."""
        if obj not in self.saved:
            self.saved.append(obj)
        return self.saved.index(obj)

    def keep_other(self, text: str) -> str:
        """Keeps an object that autograd does not save; returns its expression in the backward."""
        if text not in self.others:
            self.others.append(text)
        return f"ctx.others[{self.others.index(text)}]"


def plan_backward(
    out: Emitter,
    spec: ProgramSpec,
    split: PartitionSpec,
    inputs: Names,
    results: Sequence[str],
    leaves: Mapping[int, str],
) -> BackwardPlan:
    """Decides for each backward input which object the forward saves and how the backward reads it.

    An inner tensor is saved itself, as eager mode does: autograd checks its version counter, and a later assignment to
    the outer tensor has no effect. The outer tensor of an input is saved, too, for a backward that runs the function
    again, unless the function mutates it: its version counter rises after the forward.

    Args:
        out: Binds names in the text of the forward.
        spec: The program.
        split: Its forward and backward.
        inputs: The names of input leaves and input slots in the forward.
        results: The names of the compiled graph's outputs.
        leaves: Result leaf -> expression.
    """
    plan, interface = BackwardPlan(), spec.interface
    input_paths, output_paths = first_paths(spec.inputs.values), first_paths(interface.outputs.values)
    returned = list(interface.outputs.positions)
    mutated = {leaf for leaf, _, _ in interface.outputs.versions}
    for source in split.backward_inputs:
        match source:
            case FromInput(index) if input_paths.get(index, (None,))[0] in mutated:
                plan.save(source, inputs.slots[index])
            case FromInput(index) if isinstance(spec.inputs.items[index], Tensor):
                leaf, path = input_paths[index]
                if path:
                    plan.inner.append((leaf, path, plan.save(source, inputs.slots[index])))
                else:
                    plan.leaves[leaf] = plan.save(source, inputs.leaves[leaf])
            case FromInput(index):
                plan.reads[source] = plan.keep_other(inputs.slots[index])
            case FromForward(index) if index < interface.num_forward and returned[index] in output_paths:
                leaf, path = output_paths[returned[index]]
                plan.save(source, results[index] if path else leaves[leaf])
            case FromForward(index) if isinstance(split.forward_outputs[index], Tensor):
                plan.save(source, results[index])
            case FromForward(index):
                plan.reads[source] = plan.keep_other(results[index])
            case FromTangent():
                pass
    plan.leaves |= {leaf: plan.keep(inputs.leaves[leaf]) for leaf, _, _ in plan.inner}
    _plan_tangents(plan, interface, leaves)
    return plan


def _plan_tangents(plan: BackwardPlan, interface: Interface, leaves: Mapping[int, str]) -> None:
    for number, value in interface.tangents:
        companions = (path for part, path in parts_of(value) if isinstance(part, Constant))
        for path in companions:  # non-differentiable inner tensors that a tangent shares with its result
            plan.companion_reads[number, path] = plan.keep_other(".".join([leaves[number], *path]))
        for slot, path in paths_of(value) if len(interface.tangents) > 1 else ():
            if is_symbolic(interface.tangent_items[slot]):
                plan.size_reads[slot] = plan.keep_other(".".join([leaves[number], *path, "size()"]))


def first_paths(values: Sequence[Value]) -> dict[int, tuple[int, tuple[str, ...]]]:
    """Returns slot -> (leaf, attribute path) of the first occurrence of each plain tensor in the values."""
    paths: dict[int, tuple[int, tuple[str, ...]]] = {}
    for leaf, value in enumerate(values):
        for slot, path in paths_of(value):
            paths.setdefault(slot, (leaf, path))
    return paths


# ------------------------------------------------------------------------------------------------- variants


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant of the backward.

    Attributes:
        present: Per tangent, whether it arrives.
        sources: The source of each input of the graph.
        items: The fake tensor or symbolic number of each input of the graph.
        gradients: The fake tensor or symbolic number of each output; None where an argument gets no gradient.
        compiled: The compiled graph; None if no gradient arrives at all.
    """

    present: tuple[bool, ...]
    sources: tuple[BackwardInput, ...]
    items: tuple[Any, ...]
    gradients: tuple[Any, ...]
    compiled: CompiledGraph | None


def variant_name(present: tuple[bool, ...]) -> str:
    """Returns the name of a variant's function: `backward_10` if only the first of two gradients arrives."""
    return f"backward_{presence_bits(present)}"


class VariantEmitter:
    """Emits one variant.

    Attributes:
        out: Receives the text.
        interface: The inputs and outputs of the joint graph.
        plan: The values that the forward saves.
        on_mismatch: The name of the function that runs for gradients which do not match the traced gradients.
        autocast: Whether autocast is on for some device.
        reads_memory: Whether the compiled graph reads memory directly, without support for lazy negation and for
            vmap's batches.
    """

    def __init__(
        self,
        out: Emitter,
        interface: Interface,
        plan: BackwardPlan,
        on_mismatch: str,
        *,
        autocast: bool,
        reads_memory: bool,
    ) -> None:
        self.out, self.interface, self.plan, self.on_mismatch = out, interface, plan, on_mismatch
        self.autocast, self.reads_memory = autocast, reads_memory

    def emit(self, variant: Variant) -> None:
        """Emits `def <name>(ctx, tangent0, ...)`."""
        out = self.out
        tangents = {number: f"tangent{number}" for number, _ in self.interface.tangents}
        with block(out, f"def {variant_name(variant.present)}(ctx, {', '.join(tangents.values())}):"):
            if variant.compiled is None:
                out.writeline(
                    f"return {', '.join(['None'] * (2 + len(differentiable_leaves(self.interface))))}"
                )
                return
            arrived = [
                (number, value)
                for (number, value), present in zip(self.interface.tangents, variant.present, strict=True)
                if present
            ]
            items = self.emit_unwrapping(arrived, self.emit_check(tangents, arrived))
            self._emit_zeros(variant, items)
            self._emit_gradients(variant, items)

    def emit_check(self, tangents: dict[int, str], arrived: list[tuple[int, Value]]) -> dict[int, str]:
        """Emits the check that gradients match the traced gradients; `on_mismatch` runs for others.

        A gradient that does not arrive fails the check too, since None has another type.

        Args:
            tangents: Result leaf -> parameter, for all tangents.
            arrived: (result leaf, value) of the tangents that arrive in this variant.

        Returns:
            Tangent slot -> name, for the plain tensors that the check has read.
        """
        out, items = self.out, {}
        for number, value in arrived:
            if isinstance(value, Wrapper) and isinstance(value.context, DTensorContext):
                bound_placed, context = out.bind(placed, "placed"), out.bind(value.context, "context")
                out.writeline(f"{tangents[number]} = {bound_placed}({tangents[number]}, {context})")
        mismatches = [f"{out.bind(torch.is_grad_enabled, 'is_grad_enabled')}()"]
        for number, value in arrived:
            mismatches += self._mismatches(tangents[number], number, value, (), items)
        with block(out, "if ("):
            for number, text in enumerate(mismatches):
                out.writeline(f"or {text}" if number else text)
        with block(out, "):"):
            out.writeline(f"return {self.on_mismatch}(ctx, {tuple_of(tangents.values())})")
        return items

    def _mismatches(
        self, name: str, number: int, value: Value, path: tuple[str, ...], items: dict[int, str]
    ) -> Iterator[str]:
        """Yields the conditions under which a tangent, or an inner tensor of one, does not match its value.

        Args:
            name: The expression of the tensor.
            number: The result leaf of the tangent.
            value: The expected structure.
            path: The attribute path from the tangent to the tensor.
            items: Tangent slot -> name; receives the names that the conditions assign.
        """
        out = self.out
        match value:
            case Plain() if self.reads_memory:
                return
            case Plain(index) if path and index not in items:
                items[index] = out.fresh_name(f"g{index}")
                yield f"type({items[index]} := {name}) is not {out.bind(Tensor, 'Tensor')}"
            case Plain():
                yield f"type({name}) is not {out.bind(Tensor, 'Tensor')}"
            case Constant():
                companion, equal = self.plan.companion_reads[number, path], out.bind(torch.equal, "equal")
                yield f"{name} is not {companion} and not {equal}({name}, {companion})"
            case Wrapper():
                yield self._type_mismatch(name, value, is_inner=bool(path))
                yield from self._metadata_mismatches(name, value, is_inner=bool(path))
                for field_name, part in value.inner:
                    if not (isinstance(part, Plain) and issubclass(value.cls, TensorSubclass)):
                        inner = f"{name}.{field_name}", number, part, (*path, field_name)
                        yield from self._mismatches(*inner, items)

    def _type_mismatch(self, name: str, value: Wrapper, *, is_inner: bool) -> str:
        cls: Any = value.cls
        takes_values = value_class(value) or (is_inner and issubclass(cls, TensorSubclass))
        classes = dict.fromkeys((cls.Cotangent, cls._value_cls) if takes_values else (cls,))
        names = [self.out.bind(cls, cls.__name__) for cls in classes]
        return " and ".join(f"type({name}) is not {cls}" for cls in names)

    def _metadata_mismatches(self, name: str, value: Wrapper, *, is_inner: bool) -> Iterator[str]:
        out = self.out
        if issubclass(value.cls, TensorSubclass):
            context: Any = value.context
            layouts = [context, context.values] if value_class(value) else [context]
            if is_inner:
                layouts = [cotangent_layout(context), value_layout(context)]
            names = [out.bind(layout, "layout") for layout in dict.fromkeys(layouts)]
            yield " and ".join(f"{name}._layout is not {layout}" for layout in names)
        elif isinstance(value.context, DTensorContext):  # `placed` has converted the placements
            mesh = out.bind(value.context.spec.mesh, "mesh")
            yield f"{name}.device_mesh is not {mesh} and {name}.device_mesh != {mesh}"
        elif isinstance(value.context, OpaqueContext):
            names = tuple(inner for inner, _ in value.inner)
            context = out.bind(value.context, "context")
            yield f"{out.bind(take_apart, 'take_apart')}({name}) != ({names!r}, {context})"
        elif not value.fixed_flatten:
            names = [inner for inner, _ in value.inner]
            context = emit_constant(out, value.context)
            yield f"tuple({name}.__tensor_flatten__()) != ({names!r}, {context})"

    def emit_unwrapping(self, arrived: list[tuple[int, Value]], known: Mapping[int, str]) -> dict[int, str]:
        """Emits the lines that unwrap tangents into plain tensors in the traced memory order.

        Args:
            arrived: (result leaf, value) of the tangents that arrive.
            known: Tangent slot -> name, for the plain tensors that the check has read.

        Returns:
            Tangent slot -> name, for all plain tensors of the tangents.
        """
        items = dict(known)
        for number, value in arrived:
            for slot, path in paths_of(value):
                if slot in items:
                    read = items[slot]
                else:
                    read = ".".join([f"tangent{number}", *path])
                    items[slot] = self.out.fresh_name(f"g{slot}")
                text = (
                    read if self.reads_memory else self._restrided(read, self.interface.tangent_items[slot])
                )
                self.out.writeline(f"{items[slot]} = {text}")
        if self.reads_memory:
            self._emit_settling(items)
        return items

    def _restrided(self, read: str, fake: Tensor) -> str:
        """Returns the expression of a tensor in the traced memory order; the call copies only if necessary."""
        order = stride_order(fake)
        if order == tuple(range(fake.dim())):
            return f"{read}.contiguous()"
        return f"{self.out.bind(restride, 'restride')}({read}, {order})"

    def _emit_settling(self, items: dict[int, str]) -> None:
        """Emits one C++ check of all plain tangents; `settle` converts tangents that do not pass, if it can."""
        out, names = self.out, list(items.values())
        fakes = [self.interface.tangent_items[slot] for slot in items]
        note_skipped_check(out, "type, memory order and lazy negation one by one: one C++ call looks at all")
        check = out.bind(tensor_guards(fakes).check, "same_gradients")
        with block(out, f"if not {check}({', '.join(names)}):"):
            orders = tuple_of(str(stride_order(fake)) for fake in fakes)
            out.writeline(f"settled = {out.bind(settle, 'settle')}({tuple_of(names)}, {orders})")
            with block(out, "if settled is None:"):
                tangents = tuple_of(f"tangent{number}" for number, _ in self.interface.tangents)
                out.writeline(f"return {self.on_mismatch}(ctx, {tangents})")
            out.writeline(f"{targets_of(names)} = settled")
        for name, fake in zip(names, fakes, strict=True):
            if any(map(is_symbolic, fake.size())):  # the C++ check skips symbolic strides
                out.writeline(f"{name} = {self._restrided(name, fake)}")

    def _emit_zeros(self, variant: Variant, items: dict[int, str]) -> None:
        """Emits zeros for each missing tangent that the pruned graph still reads."""
        for source in variant.sources:
            if isinstance(source, FromTangent) and source.index not in items:
                items[source.index] = self.out.fresh_name(f"g{source.index}")
                fake = self.interface.tangent_items[source.index]
                size = self.plan.size_reads.get(source.index) or repr(tuple(fake.size()))
                self.out.writeline(f"{items[source.index]} = {zeros_expression(self.out, fake, size)}")

    def _emit_gradients(self, variant: Variant, items: dict[int, str]) -> None:
        out = self.out
        if any(self.plan.reads.get(source, "").startswith("saved") for source in variant.sources):
            note_skipped_check(out, "type, dtype and size of saved tensors: the compiled forward made them")
            out.writeline("saved = ctx.saved_tensors")
        arguments = [
            items[source.index] if isinstance(source, FromTangent) else self.plan.reads[source]
            for source in variant.sources
        ]
        emit_recheck(out, arguments, expect_plain("saved_and_tangents", variant.items))
        gradients = emit_graph_call(
            out,
            variant.compiled,
            f"[{', '.join(join_saved(arguments, len(self.plan.saved)))}]",
            ["_" if item is None else f"grad{n}" for n, item in enumerate(variant.gradients)],
            self.autocast,
        )
        returned = ["None", "None"]
        for number in differentiable_leaves(self.interface):
            value = dict(self.interface.grads)[number]
            assert value is not None
            items_of_leaf = [variant.gradients[slot] for slot, _ in paths_of(value)]
            # A gradient of a class also holds non-differentiable inner tensors, such as offsets.
            if any(isinstance(item, Tensor) and is_differentiable(item) for item in items_of_leaf):
                returned.append(emit_value(out, value, lambda slot: gradients[slot], f"d{number}"))
            else:
                returned.append("None")
        out.writeline(f"return {', '.join(returned)}")


def value_class(value: Value) -> Any:
    """Returns a structure's value class for its cotangent, since values may arrive as gradients, too; else None."""
    cls: Any = value.cls if isinstance(value, Wrapper) else Tensor
    is_one = issubclass(cls, TensorSubclass) and cls._is_cotangent and not cls._traits.is_representation
    return cls._value_cls if is_one else None


def differentiable_leaves(interface: Interface) -> list[int]:
    """Returns the input leaves that get a gradient."""
    return [number for number, value in interface.grads if value is not None]


def stride_order(fake: Tensor) -> tuple[int, ...]:
    """Returns the dimensions from the largest stride to the smallest."""
    return tuple(sorted(range(fake.dim()), key=lambda dim: -hint(fake.stride(dim))))
