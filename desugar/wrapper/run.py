"""Emits the runtime wrapper of one program: `run(a0, a1, ...)`.

`run` unwraps the arguments, calls the compiled graph or the autograd function around it, and builds the result.

The forward of a generated `torch.autograd.Function` calls the compiled graph. Its arguments are the differentiable
*outer* tensors, so autograd's edges, hooks and version checks are on the tensors that the user holds. The inner
tensors are in a list, which autograd does not inspect.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from desugar.backward.emit import BackwardPlan, differentiable_leaves, plan_backward, variant_name
from desugar.backward.recompute import plan_recompute
from desugar.codegen.build_values import (
    ReadSlot,
    emit_constant,
    emit_graph_call,
    emit_ints,
    emit_results,
    is_computed,
    items_expression,
    slot_reader,
    view_ints,
)
from desugar.codegen.debug_checks import Expected, emit_recheck
from desugar.codegen.runtime import bump_versions, check_inference_mode, note_versions
from desugar.codegen.text import block, targets_of, tuple_of
from desugar.codegen.unpack import Names, emit_unpacking
from desugar.ir.stages import CompiledGraphs, FromForward, PartitionSpec, ProgramSpec
from desugar.ir.storage import are_apart
from desugar.ir.values import Constant, Plain, Same, Value, View, Wrapper
from desugar.recording.listeners import note_skipped_check
from subclasses.handwritten import DTensorContext
from subclasses.source_text.emitter import Emitter

# ------------------------------------------------------------------------------------------------- run


def emit_program(
    compiled: CompiledGraphs, on_mismatch: Callable[..., Any]
) -> tuple[Emitter, BackwardPlan | None]:
    """Emits the text of one program: the autograd function if there is a backward, then `run`.

    Args:
        compiled: The program.
        on_mismatch: Runs the calls whose arguments share memory, have other storage offsets, or are DTensors of other
            sizes, where the program depends on these.

    Returns:
        The text, and the plan of the backward; None in inference.
    """
    out = Emitter()
    out.reserve("run", "items", "tensor_args", "ctx", "Backward", "backwards", "apply", "_")
    plan = None
    if compiled.spec.split is not None:
        plan = _emit_function(out, compiled, compiled.spec.split)
        out.writeline()
        out.writeline()
    _emit_run(out, compiled, on_mismatch)
    return out, plan


def _emit_run(out: Emitter, compiled: CompiledGraphs, on_mismatch: Callable[..., Any]) -> None:
    spec = compiled.spec
    parameters = [out.fresh_name(f"a{n}") for n in range(spec.inputs.num_arguments)]
    with block(out, f"def run({', '.join(parameters)}):"):
        names = emit_unpacking(out, compiled, parameters)
        mismatches = [*_overlaps(out, spec, names), *_offset_mismatches(spec, names)]
        mismatches += _global_shape_mismatches(out, spec, names)
        if mismatches:
            with block(out, f"if {' or '.join(mismatches)}:"):
                out.writeline(f"return {out.bind(on_mismatch, 'run_eagerly')}({', '.join(parameters)})")
        tensors = spec.inputs.tensor_leaves
        arguments = Expected(
            "arguments", tuple(spec.inputs.values[n] for n in tensors), dict(enumerate(spec.inputs.items))
        )
        emit_recheck(out, [names.leaves[n] for n in tensors], arguments)
        _emit_inference_check(out, spec, names)
        raise_line = _emit_version_reads(out, spec, names)
        leaves, read = (_emit_training if spec.split else _emit_inference)(out, compiled, names)
        for leaf, name, number in spec.outputs.assigns:
            out.writeline(f"{names.leaves[leaf]}.{name} = {leaves[number]}")
        for leaf, number in spec.outputs.writes:
            out.writeline(f"{names.leaves[leaf]}.copy_({leaves[number]})")
        if raise_line:
            out.writeline(raise_line)
        _emit_views(out, spec, names, leaves, read)
        out.writeline(f"return {tuple_of(leaves[n] for n in range(len(spec.outputs.visible)))}")


def _overlaps(out: Emitter, spec: ProgramSpec, names: Names) -> list[str]:
    """Returns the condition that a mutated tensor shares memory with another tensor; an empty list if no tensor can."""
    written, tensors = spec.outputs.written_slots(spec.inputs.values), spec.inputs.tensor_slots
    if not written or len(tensors) < 2:
        return []
    mutated = tuple_of(names.slots[n] for n in tensors if n in written)
    others = tuple_of(names.slots[n] for n in tensors if n not in written)
    return [f"not {out.bind(are_apart, 'are_apart')}({mutated}, {others})"]


def _offset_mismatches(spec: ProgramSpec, names: Names) -> list[str]:
    """Returns the conditions that tensors have other storage offsets than in the trace, if the program uses offsets."""
    if not spec.interface.offsets_matter:
        return []
    offsets = {n: spec.inputs.items[n].storage_offset() for n in spec.inputs.tensor_slots}
    return [
        f"{names.slots[n]}.storage_offset() != {offset}"
        for n, offset in offsets.items()
        if isinstance(offset, int)
    ]


def _global_shape_mismatches(out: Emitter, spec: ProgramSpec, names: Names) -> list[str]:
    """Returns the conditions that DTensors have other global shapes than in the trace.

    Dynamo guards only local tensors. An unevenly sharded tensor may have the same local tensor for two sizes, on some
    ranks.
    """
    leaves = enumerate(spec.inputs.values)
    dtensors = [dtensor for leaf, value in leaves for dtensor in _dtensors_in(names.leaves[leaf], value)]
    return [condition for name, value in dtensors for condition in _dtensor_mismatches(out, name, value)]


def _dtensors_in(name: str, value: Value) -> Iterator[tuple[str, Wrapper]]:
    if not isinstance(value, Wrapper):
        return
    if isinstance(value.context, DTensorContext):
        yield name, value
    for field, part in value.inner:
        yield from _dtensors_in(f"{name}.{field}", part)


def _dtensor_mismatches(out: Emitter, name: str, value: Wrapper) -> Iterator[str]:
    if all(isinstance(extent, int) for extent in (*value.size, *value.stride)):
        meta = value.context.spec_of(value.size, value.stride).tensor_meta
        yield f"{name}._spec.tensor_meta != {out.bind(meta, 'meta')}"
        return
    for method, extents in (("size", value.size), ("stride", value.stride)):
        constants = {dim: extent for dim, extent in enumerate(extents) if isinstance(extent, int)}
        yield from (f"{name}.{method}({dim}) != {extent}" for dim, extent in constants.items())


def _emit_inference_check(out: Emitter, spec: ProgramSpec, names: Names) -> None:
    """Emits a check of inference mode if the program writes to inference tensors: Dynamo does not guard the mode."""
    inputs, written = spec.inputs, spec.outputs.written_slots(spec.inputs.values)
    inference = [slot for slot in sorted(written) if inputs.origins[slot] in inputs.inference]
    if inference:
        check = out.bind(check_inference_mode, "check_inference_mode")
        out.writeline(f"{check}({tuple_of(names.slots[slot] for slot in inference)})")


def _emit_version_reads(out: Emitter, spec: ProgramSpec, names: Names) -> str | None:
    """Emits the lines that read the version counters of mutated tensors; returns the line that advances them later."""
    rises = spec.outputs.versions
    if not rises:
        return None
    written, before = out.fresh_name("written"), out.fresh_name("versions")
    tensors = tuple_of(".".join([names.leaves[leaf], *path]) for leaf, path, _ in rises)
    out.writeline(f"{written} = {tensors}")
    out.writeline(f"{before} = {out.bind(note_versions, 'note_versions')}({written})")
    amounts = tuple_of(rise for _, _, rise in rises)
    return f"{out.bind(bump_versions, 'bump_versions')}({written}, {before}, {amounts})"


def _emit_views(
    out: Emitter, spec: ProgramSpec, names: Names, leaves: dict[int, str], read: ReadSlot
) -> None:
    """Emits the lines that take the views among the results; adds their names to `leaves`."""
    for number, value in enumerate(spec.outputs.values):
        if not isinstance(value, View):
            continue
        base = names.leaves[value.index] if value.of == "input" else leaves[value.index]
        base = f"{base}.detach()" if value.detached else base
        leaves[number] = name = out.fresh_name(f"out{number}")
        line = f"{name} = {out.bind(value.replay, 'take_view')}({base}, {emit_ints(value.ints, read)})"
        if value.no_grad:
            with block(out, f"with {out.bind(torch.no_grad, 'no_grad')}():"):
                out.writeline(line)
        else:
            out.writeline(line)
    for number, value in enumerate(spec.outputs.values):
        if isinstance(value, Same) and number not in leaves:
            leaves[number] = leaves[value.index]


def _emit_inference(out: Emitter, compiled: CompiledGraphs, names: Names) -> tuple[dict[int, str], ReadSlot]:
    spec = compiled.spec
    unread = spec.outputs.unread_positions
    hints = ["_" if n in unread else f"r{n}" for n in range(spec.interface.num_forward)]
    note_skipped_check(
        out, "a walk over the arguments, and a copy of their list: the items are named one by one"
    )
    results = emit_graph_call(out, compiled.forward, items_expression(spec, names), hints, spec.is_autocast)
    return emit_results(out, spec, names, results), slot_reader(spec, names, results)


def _emit_training(out: Emitter, compiled: CompiledGraphs, names: Names) -> tuple[dict[int, str], ReadSlot]:
    spec = compiled.spec
    computed = [number for number, value in enumerate(spec.outputs.values) if is_computed(value)]
    leaves = {number: out.fresh_name(f"out{number}") for number in computed}
    ints = {slot: out.fresh_name(f"n{slot}") for slot in view_ints(spec)}
    tensor_args = tuple_of(names.leaves[leaf] for leaf in spec.inputs.tensor_leaves)
    differentiable = ", ".join(names.leaves[leaf] for leaf in differentiable_leaves(spec.interface))
    call = f"apply({items_expression(spec, names)}, {tensor_args}, {differentiable})"
    note_skipped_check(
        out, "a walk over the arguments, and a copy of their list: the items are named one by one"
    )
    out.writeline(f"{', '.join([*leaves.values(), *ints.values()])} = {call}")
    for number, value in enumerate(spec.outputs.values):
        match value:
            case Same("input", index):
                leaves[number] = names.leaves[index]
            case Same(_, index) if index in leaves:
                leaves[number] = leaves[index]
            case Constant(constant, None):
                leaves[number] = emit_constant(out, constant)
    inputs = spec.outputs.inputs
    return leaves, lambda slot: names.slots[inputs[slot]] if slot in inputs else ints[slot]


# ------------------------------------------------------------------------------------ the autograd function


def _emit_function(out: Emitter, compiled: CompiledGraphs, split: PartitionSpec) -> BackwardPlan:
    """Emits `class Backward(torch.autograd.Function)`, whose global `backwards` is the table of variants."""
    spec = compiled.spec
    function = out.bind(torch.autograd.Function, "Function")
    with block(out, f"class Backward({function}):"):
        out.writeline("@staticmethod")
        with block(out, "def forward(ctx, items, tensor_args, *differentiable):"):
            plan = _emit_forward(out, compiled, split)
        out.writeline()
        out.writeline("@staticmethod")
        arriving = {number: f"tangent{number}" for number, _ in spec.interface.tangents}
        computed = [number for number, value in enumerate(spec.outputs.values) if is_computed(value)]
        parameters = [arriving.get(number) or out.fresh_name("_unused") for number in computed]
        parameters += [out.fresh_name("_unused") for _ in view_ints(spec)]  # autograd passes None for an int
        plan.is_replaced = len(parameters) == len(arriving)
        note = (
            f"  # until {variant_name((True,) * len(arriving))} takes its place" if plan.is_replaced else ""
        )
        with block(out, f"def backward(ctx, {', '.join(parameters)}):{note}"):
            present = ", ".join(f"{name} is not None" for name in arriving.values())
            present += "," * (len(arriving) == 1)
            out.writeline(f"return backwards[{present}](ctx, {', '.join(arriving.values())})")
    out.writeline()
    out.writeline()
    note_skipped_check(out, "a look for functorch transforms: under one, guards do not match")
    out.writeline(f"apply = super({function}, Backward).apply")
    return plan


def _emit_forward(out: Emitter, compiled: CompiledGraphs, split: PartitionSpec) -> BackwardPlan:
    spec = compiled.spec
    names = _emit_forward_names(out, spec)
    count = len(split.forward_outputs)
    read_later = {s.index for s in split.backward_inputs if isinstance(s, FromForward)}
    unread = spec.outputs.unread_positions
    results = emit_graph_call(
        out,
        compiled.forward,
        "items",
        ["_" if n in unread - read_later else f"r{n}" for n in range(count)],
        spec.is_autocast,
    )
    leaves = emit_results(out, spec, names, results)
    plan = plan_backward(out, spec, split, names, results, leaves)
    plan_recompute(spec, split, plan, names)
    if plan.saved:
        out.writeline(f"ctx.save_for_backward({', '.join(plan.saved)})")
    if plan.others:
        out.writeline(f"ctx.others = {tuple_of(plan.others)}")
    _emit_recompute_record(out, plan, names)
    out.writeline("ctx.set_materialize_grads(False)")
    computed = [(leaves[n], value) for n, value in enumerate(spec.outputs.values) if is_computed(value)]
    constant = [
        leaf for leaf, value in computed if isinstance(value, Plain | Wrapper) and not value.requires_grad
    ]
    if constant:
        out.writeline(f"ctx.mark_non_differentiable({', '.join(constant)})")
    read = slot_reader(spec, names, results)
    returned = [leaf for leaf, _ in computed] + [read(slot) for slot in view_ints(spec)]
    out.writeline(f"return {returned[0] if len(returned) == 1 else tuple_of(returned)}")
    return plan


def _emit_forward_names(out: Emitter, spec: ProgramSpec) -> Names:
    """Emits the lines that unpack `tensor_args` and `items`; returns the names of input leaves and input slots."""
    leaves = {leaf: out.fresh_name(f"x{leaf}") for leaf in spec.inputs.tensor_leaves}
    slots = {slot: out.fresh_name(f"i{slot}") for slot in range(len(spec.inputs.items))}
    out.writeline(f"{targets_of(leaves.values())} = tensor_args")
    out.writeline(f"{targets_of(slots.values())} = items")
    return Names([leaves.get(n, "None") for n in range(len(spec.inputs.values))], slots)


def _emit_reference(out: Emitter, plan: BackwardPlan, n: int, name: str) -> str:
    if n in plan.strong:
        return name
    weak = f"{out.bind(weakref.ref, 'ref')}({name})"
    return f"{weak} if {name}.is_leaf else {name}" if n in plan.strong_unless_leaf else weak


def _emit_recompute_record(out: Emitter, plan: BackwardPlan, names: Names) -> None:
    """Emits the lines that record the objects by which a backward can run the function again.

    Arguments are recorded by weak reference, except the leaves in `plan.strong`, and the non-leaves of autograd in
    `plan.strong_unless_leaf`.
    """
    if plan.referred:
        entries = [_emit_reference(out, plan, n, names.leaves[n]) for n in plan.referred]
        out.writeline(f"ctx.alive = {tuple_of(entries)}")
    if plan.versioned:
        versions = tuple_of(f"{names.leaves[n]}._version" for n in plan.versioned)
        out.writeline(f"ctx.versions = {versions}")
