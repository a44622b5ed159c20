"""Plans the values that a program's forward saves and records, and the expressions by which a backward reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from desugar.codegen.unpack import Names
from desugar.ir.abstract_values import is_symbolic
from desugar.ir.stages import (
    BackwardInput,
    FromForward,
    FromInput,
    FromTangent,
    Interface,
    ProgramSpec,
    Split,
)
from desugar.ir.values import Constant, Value, parts_of, paths_of
from subclasses.codegen.emitter import Emitter


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
        held: Input leaves that are referenced strongly if they are non-leaves of autograd: eager mode keeps their
            history alive, too.
        kept: Input leaves that are referenced strongly in any case. These are all, if a result may get plain gradients
            where gradients of its class were traced. Else they are tensors without dimensions, which Dynamo makes of
            floats at each call.
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
    held: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
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
    split: Split,
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
    plan, traced = BackwardPlan(), spec.interface
    input_paths, output_paths = first_paths(spec.inputs.values), first_paths(traced.outputs.values)
    returned = list(traced.outputs.positions)
    mutated = {leaf for leaf, _, _ in traced.outputs.versions}
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
            case FromForward(index) if index < traced.num_forward and returned[index] in output_paths:
                leaf, path = output_paths[returned[index]]
                plan.save(source, results[index] if path else leaves[leaf])
            case FromForward(index) if isinstance(split.forward_outputs[index], Tensor):
                plan.save(source, results[index])
            case FromForward(index):
                plan.reads[source] = plan.keep_other(results[index])
            case FromTangent():
                pass
    plan.leaves |= {leaf: plan.keep(inputs.leaves[leaf]) for leaf, _, _ in plan.inner}
    _plan_tangents(plan, traced, leaves)
    return plan


def _plan_tangents(plan: BackwardPlan, traced: Interface, leaves: Mapping[int, str]) -> None:
    for number, value in traced.tangents:
        companions = (path for part, path in parts_of(value) if isinstance(part, Constant))
        for path in companions:  # non-differentiable inner tensors that a tangent shares with its result
            plan.companion_reads[number, path] = plan.keep_other(".".join([leaves[number], *path]))
        for slot, path in paths_of(value) if len(traced.tangents) > 1 else ():
            if is_symbolic(traced.tangent_items[slot]):
                plan.size_reads[slot] = plan.keep_other(".".join([leaves[number], *path, "size()"]))


def first_paths(values: Sequence[Value]) -> dict[int, tuple[int, tuple[str, ...]]]:
    """Returns slot -> (leaf, attribute path) of the first occurrence of each plain tensor in the values."""
    paths: dict[int, tuple[int, tuple[str, ...]]] = {}
    for leaf, value in enumerate(values):
        for slot, path in paths_of(value):
            paths.setdefault(slot, (leaf, path))
    return paths
