"""From a Python function to one plain-tensor graph: forward, or forward and backward jointly.

The function runs twice on fake tensors. The first run (`discover`) finds which outside tensors it touches and
what its result is made of. The second (`trace_graph`) is recorded: plain inner tensors come in, are made
functional, the subclasses are rebuilt around them, the function runs, its results are taken apart again and,
when something requires grad, `autograd.grad` runs with subclasses rebuilt around the tangents too. What
reaches the graph is plain, and mutation and aliasing are found among *inner* tensors because functionalization
sits below the subclasses (the "desugar first" order; AOTAutograd, whose stages these are, analyses the
wrappers instead).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx.graph import CodeGen

from desugar import _torch as private
from desugar.errors import DesugarError
from desugar.frontend.inputs import Inputs, StaticNeeded
from desugar.ir.fx_utils import read_sizes_early
from desugar.ir.outputs import Outputs
from desugar.ir.stages import GradientCall, LeafFunction, Traced
from desugar.ir.storage import may_overlap, storage_of
from desugar.ir.values import (
    Constant,
    Flat,
    Plain,
    Value,
    Wrapper,
    renumber,
    requires_grad,
    unwrap_value,
    wrap_value,
)
from desugar.recording.ops import record_backward, record_ops
from desugar.tracing import nonlinear_gradients, unsupported
from desugar.tracing.captured_tensors import Capture, enter, functional
from desugar.tracing.effect_tokens import end_effects, start_effects
from desugar.tracing.functionalize import check_rng
from desugar.tracing.modes import tracing_modes
from desugar.tracing.outputs import Result, take_apart
from desugar.tracing.run import Entered, Run, changed_slots, identity, plain, storages_of
from subclasses import TensorSubclass

# ------------------------------------------------------------------------------------- running the function


def run_function(call: LeafFunction, inputs: Inputs, primals: Sequence[Any]) -> Run:
    """Rebuilds the arguments around functional tensors and calls the function on them."""
    items = [functional(primal) for primal in primals]
    for base, slots in inputs.bases.items():
        for slot in slots:
            items[slot] = part_of(items[base], inputs.fake_items[slot])
    versions = [item._version if isinstance(item, Tensor) else 0 for item in items]
    entered: list[Entered] = []
    for value in inputs.values:
        entered.append(enter(value, inputs, items, entered))
        if len(entered) - 1 in inputs.parameters:
            entered[-1].leaf._is_param = True  # by which isinstance knows an nn.Parameter
    storages = [storages_of(item) for item in items]
    arguments, captured = entered[: inputs.num_arguments], entered[inputs.num_arguments :]
    capture = Capture(inputs, items, storages, arguments)
    capture.leaves = {id(t): leaf for t, leaf in zip(inputs.captured, captured, strict=True)}
    tokens = start_effects()
    with capture, unsupported.kept_grad_mode():
        result = capture.replace_result(call([leaf.leaf for leaf in arguments]))
    end_effects()
    entered += [capture.leaves[id(tensor)] for tensor in inputs.captured[len(captured) :]]
    versions += [0] * (len(items) - len(versions))
    return Run(items, versions, storages, entered, inputs.homes, result, tuple(tokens.values()))


def part_of(base: Any, fake: Tensor) -> Any:
    """The tensor of an input that lies within another; no view in autograd's eyes, as the input is none."""
    part = base.as_strided(fake.size(), fake.stride(), fake.storage_offset())
    return private.FunctionalTensor(part.elem, private.detect_infra_mode(private.ModeKey.FUNCTIONAL))


# --------------------------------------------------------------------------------------------- the two runs


def discover(call: LeafFunction, inputs: Inputs) -> Outputs:
    """Runs the function once: captures outside tensors, finds the result's structure, refuses what must be.

    Raises:
        DesugarError: For what the pass does not take (see `desugar.tracing.unsupported`); nothing was changed.
    """
    with tracing_modes(inputs.fakes.mode) as mode, inputs.fakes.env.ignore_fresh_unbacked_symbols():
        run = run_function(call, inputs, inputs.primals())
        check_rng(mode.rng)
        overlaps = [] if inputs.are_apart else find_overlaps(run, inputs)
    if overlaps:
        for slots in overlaps:
            inputs.add_base(slots)
        return discover(call, inputs)
    with tracing_modes(inputs.fakes.mode), inputs.fakes.env.ignore_fresh_unbacked_symbols():
        unsupported.check_run(run, inputs)
        unsupported.check_results(run)
        outputs, _ = take_apart(run)
        inputs.is_sealed = True
        return outputs


def find_overlaps(run: Run, inputs: Inputs) -> list[tuple[int, ...]]:
    """Groups of inputs that lie in one storage, overlap, and are written to; those that have a base left out."""
    groups: list[tuple[int, ...]] = []
    for slot in sorted({slot for value in inputs.values for slot in changed_slots(value, run.items)}):
        if slot in inputs.homes or any(slot in group for group in groups):
            continue
        real = inputs.flat.items[slot]
        near = [
            n
            for n, item in enumerate(inputs.flat.items)
            if isinstance(item, Tensor) and may_overlap(item, real)
        ]
        if len(near) > 1:
            inside = [n for n, item in enumerate(inputs.flat.items) if isinstance(item, Tensor)]
            groups.append(tuple(n for n in inside if storage_of(inputs.flat.items[n]) == storage_of(real)))
    return groups


# What some formulas of autograd give for a zero gradient.
_ZEROS = torch.ops.aten._efficientzerotensor.default


def trace_graph(
    call: LeafFunction, inputs: Inputs, outputs: Outputs, decompositions: Mapping[Any, Any]
) -> Traced:
    """Traces the function into a graph: forward alone, or jointly with the backward if a result requires grad."""
    wanted = [
        (number, value)
        for number, value in enumerate(outputs.values)
        if torch.is_grad_enabled() and requires_grad(value)
    ]
    with tracing_modes(inputs.fakes.mode):
        tangents, tangent_items = make_tangents(wanted, outputs)
        recorder = _Recorder(call, inputs, outputs, tangents)

        def joint(
            primals: list[Any], tangents: list[Tensor]
        ) -> list[Any]:  # make_fx names inputs after these
            return recorder.joint(primals, tangents)

        with record_ops():
            graph = private.make_fx(joint, decomposition_table=dict(decompositions))(
                inputs.primals(), list(tangent_items)
            )
    if inputs.has_symbols and graph.graph.find_nodes(op="call_function", target=_ZEROS):
        raise StaticNeeded  # such zeros are recorded with the sizes of this call, not with its symbols
    calls = nonlinear_gradients.take_calls(graph, recorder.calls)
    unsupported.check_constants(graph)
    read_sizes_early(graph)
    graph.graph.set_codegen(CodeGen())
    graph.graph.eliminate_dead_code()
    graph.recompile()
    unsupported.check_recomputed(graph)
    return Traced(
        graph,
        recorder.outputs,
        len(recorder.outputs.returned),
        tangents,
        tangent_items,
        tuple(recorder.grads),
        calls,
    )


class _Recorder:
    """The function that `make_fx` traces, and what it learns meanwhile."""

    def __init__(
        self, call: LeafFunction, inputs: Inputs, outputs: Outputs, tangents: Sequence[tuple[int, Value]]
    ) -> None:
        self.call, self.inputs, self.tangents = call, inputs, tangents
        self.expected = self.outputs = outputs
        self.grads: list[tuple[int, Value | None]] = []
        self.calls: list[GradientCall] = []

    def joint(self, primals: list[Any], tangents: list[Tensor]) -> list[Any]:
        """Forward outputs, then gradients, then what autograd functions got and gave, all plain."""
        run = run_function(self.call, self.inputs, primals)
        found, result = take_apart(run)
        unsupported.check_same_structure(self.expected, found)
        self.outputs = found.with_views_of(self.expected)
        forward = [self.outputs.items[slot] for slot in self.outputs.returned]
        return forward + self._backward(run, result, tangents) if self.tangents else forward

    def _backward(self, run: Run, result: Result, tangents: list[Tensor]) -> list[Any]:
        leaves, items = result.leaves, [functional(tangent) for tangent in tangents]
        cotangents = [
            tangent_leaf(value, items, leaves[number], result.items) for number, value in self.tangents
        ]
        wanted = [n for n, value in enumerate(self.inputs.values) if requires_grad(value)]
        if not wanted:
            raise DesugarError(
                "a result requires grad because of a tensor that the function makes, and no input does",
                instead="make parameters outside the function, where their gradients can be seen, or detach the result",
            )
        results = [leaves[number] for number, _ in self.tangents]
        with record_backward(results), nonlinear_gradients.noting_calls(results) as self.calls:
            gradients = torch.autograd.grad(
                results, [run.entered[number].root for number in wanted], cotangents, allow_unused=True
            )
        flat, taken = Flat(), {identity(item) for item in (*run.items, *items)}
        for number, gradient in zip(wanted, gradients, strict=True):
            value = None if gradient is None else unwrap_gradient(gradient, flat, taken)
            self.grads.append((number, value))
        return [plain(item) for item in flat.items] + nonlinear_gradients.tensors_of(self.calls)


# ------------------------------------------------------------------------------------------------- tangents


def make_tangents(
    wanted: Sequence[tuple[int, Value]], outputs: Outputs
) -> tuple[tuple[tuple[int, Value], ...], tuple[Tensor, ...]]:
    """Values and fakes of the tangents of the given output leaves.

    A declared subclass's tangent has the output's own non-differentiable inner tensors (offsets, int8 data),
    so only the differentiable ones are inputs of the backward; the others are kept as output slots.
    """
    flat, tangents = Flat(), []
    for number, value in wanted:
        tangents.append((number, _tangent_value(value, outputs, flat, all_inner=False)))
    return tuple(tangents), tuple(flat.items)


def _tangent_value(value: Value, outputs: Outputs, flat: Flat, *, all_inner: bool) -> Value:
    match value:
        case Plain(index):
            fake = outputs.items[index]
            if fake.layout is not torch.strided:
                raise DesugarError(
                    "a result that requires grad is a sparse tensor",
                    instead="return its values and indices, or to_dense() of what is detached",
                )
            if not all_inner and not is_differentiable(fake):
                return Constant(None, index)
            return Plain(flat.tensor(tangent_like(fake)))
        case Wrapper():
            by_hand = not issubclass(value.cls, TensorSubclass)
            inner = tuple(
                (name, _tangent_value(part, outputs, flat, all_inner=by_hand)) for name, part in value.inner
            )
            return replace(value, inner=inner, requires_grad=False)
        case _:
            raise DesugarError(
                f"a tensor subclass that requires grad holds {value!r}, which has no gradient",
                instead="detach the result, or return its inner tensors",
            )


def is_differentiable(tensor: Tensor) -> bool:
    """Whether a tensor's dtype has gradients."""
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def tangent_like(fake: Tensor) -> Tensor:
    """A fake tangent: the strides of a dense output, otherwise contiguous."""
    with torch.no_grad():
        blank = torch.empty_like(fake)
    return plain(blank) if isinstance(blank, private.FunctionalTensor) else blank


def tangent_leaf(value: Value, items: Sequence[Any], output: Any, output_items: Sequence[Any]) -> Any:
    """The live tangent of an output leaf: from tangent inputs and the output's own other inner tensors."""
    if isinstance(value, Plain):
        return items[value.index]
    if isinstance(value, Constant):
        assert value.index is not None
        return output_items[value.index]
    assert isinstance(value, Wrapper)
    inner = {
        name: tangent_leaf(part, items, getattr(output, name), output_items) for name, part in value.inner
    }
    bare = replace(value, inner=tuple((name, Plain(n)) for n, name in enumerate(inner)))
    sizes = tuple(output.size()), tuple(output.stride())
    return wrap_value(
        replace(bare, size=sizes[0], stride=sizes[1], dynamics=_live_ints(value, output)), [*inner.values()]
    )


def unwrap_gradient(gradient: Tensor, flat: Flat, taken: set[int]) -> Value:
    """Takes a gradient apart; what is in a wrapper belongs to it alone.

    The engine sees one tensor as the gradient of two inputs, or as the caller's own, and copies it before it is
    accumulated. It cannot see that two wrappers share what is in them.

    Args:
        gradient: Of one input.
        flat: Where its tensors go.
        taken: Identities of tensors that belong to somebody else; those of this gradient are added.
    """
    found = Flat()
    value = unwrap_value(gradient, found)
    slots = []
    for item in found.items:
        if not isinstance(item, Tensor):
            slots.append(flat.number(item).index)  # type: ignore[union-attr]
            continue
        is_shared = isinstance(value, Wrapper) and is_differentiable(item) and identity(item) in taken
        taken.add(identity(item))
        slots.append(flat.tensor(item.clone() if is_shared else item))
    return renumber(value, slots)


def _live_ints(value: Wrapper, output: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((name, getattr(output, name)) for name, _ in value.dynamics)
