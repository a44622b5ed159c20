"""Emits the runtime wrapper of one program: `run(a0, a1, ...)`.

`run` unwraps the arguments, calls the compiled graph or the autograd function around it, and builds the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from desugar.backward.emit import BackwardPlan, differentiable_leaves
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
from desugar.codegen.runtime import check_inference_mode, note_versions, raise_versions
from desugar.codegen.text import block, tuple_of
from desugar.codegen.unpack import Names, emit_unpacking
from desugar.ir.stages import Compiled, ProgramSpec
from desugar.ir.storage import are_apart
from desugar.ir.values import Constant, Same, Value, View, Wrapper
from desugar.recording.listeners import note_skipped_check
from desugar.wrapper.autograd_function import emit_function
from subclasses.codegen.emitter import Emitter
from subclasses.handwritten import DTensorContext


def emit_program(compiled: Compiled, fallback: Callable[..., Any]) -> tuple[Emitter, BackwardPlan | None]:
    """Emits the text of one program: the autograd function if there is a backward, then `run`.

    Args:
        compiled: The program.
        fallback: Runs the calls whose arguments share memory, have other storage offsets, or are DTensors of other
            sizes, where the program depends on these.

    Returns:
        The text, and the plan of the backward; None in inference.
    """
    out = Emitter()
    out.reserve("run", "items", "kept", "ctx", "Backward", "backwards", "apply", "_")
    plan = None
    if compiled.spec.split is not None:
        plan = emit_function(out, compiled, compiled.spec.split)
        out.writeline()
        out.writeline()
    _emit_run(out, compiled, fallback)
    return out, plan


def _emit_run(out: Emitter, compiled: Compiled, fallback: Callable[..., Any]) -> None:
    spec = compiled.spec
    parameters = [out.fresh_name(f"a{n}") for n in range(spec.inputs.num_arguments)]
    with block(out, f"def run({', '.join(parameters)}):"):
        names = emit_unpacking(out, compiled, parameters)
        differences = [*_overlaps(out, spec, names), *_other_offsets(spec, names)]
        differences += _other_whole_sizes(out, spec, names)
        if differences:
            with block(out, f"if {' or '.join(differences)}:"):
                out.writeline(f"return {out.bind(fallback, 'fallback')}({', '.join(parameters)})")
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


def _other_offsets(spec: ProgramSpec, names: Names) -> list[str]:
    """Returns the conditions that tensors have other storage offsets than in the trace, if the program uses offsets."""
    if not spec.interface.offsets_matter:
        return []
    offsets = {n: spec.inputs.items[n].storage_offset() for n in spec.inputs.tensor_slots}
    return [
        f"{names.slots[n]}.storage_offset() != {offset}"
        for n, offset in offsets.items()
        if isinstance(offset, int)
    ]


def _other_whole_sizes(out: Emitter, spec: ProgramSpec, names: Names) -> list[str]:
    """Returns the conditions that DTensors have other sizes than in the trace; Dynamo guards only local tensors.

    An unevenly sharded tensor may have the same local tensor for two sizes, on some ranks.
    """
    leaves = enumerate(spec.inputs.values)
    found = [place for leaf, value in leaves for place in _dtensors_in(names.leaves[leaf], value)]
    return [condition for name, value in found for condition in _other_extents(out, name, value)]


def _dtensors_in(name: str, value: Value) -> Iterator[tuple[str, Wrapper]]:
    if not isinstance(value, Wrapper):
        return
    if isinstance(value.context, DTensorContext):
        yield name, value
    for field, part in value.inner:
        yield from _dtensors_in(f"{name}.{field}", part)


def _other_extents(out: Emitter, name: str, value: Wrapper) -> Iterator[str]:
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
    """Emits the lines that read the version counters of mutated tensors; returns the line that raises them later."""
    rises = spec.outputs.versions
    if not rises:
        return None
    written, before = out.fresh_name("written"), out.fresh_name("versions")
    tensors = tuple_of(".".join([names.leaves[leaf], *path]) for leaf, path, _ in rises)
    out.writeline(f"{written} = {tensors}")
    out.writeline(f"{before} = {out.bind(note_versions, 'note_versions')}({written})")
    amounts = tuple_of(rise for _, _, rise in rises)
    return f"{out.bind(raise_versions, 'raise_versions')}({written}, {before}, {amounts})"


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


def _emit_inference(out: Emitter, compiled: Compiled, names: Names) -> tuple[dict[int, str], ReadSlot]:
    spec = compiled.spec
    unread = spec.outputs.unread_positions
    hints = ["_" if n in unread else f"r{n}" for n in range(spec.interface.num_forward)]
    note_skipped_check(
        out, "a walk over the arguments, and a copy of their list: the items are named one by one"
    )
    results = emit_graph_call(out, compiled.forward, items_expression(spec, names), hints, spec.is_autocast)
    return emit_results(out, spec, names, results), slot_reader(spec, names, results)


def _emit_training(out: Emitter, compiled: Compiled, names: Names) -> tuple[dict[int, str], ReadSlot]:
    spec = compiled.spec
    computed = [number for number, value in enumerate(spec.outputs.values) if is_computed(value)]
    leaves = {number: out.fresh_name(f"out{number}") for number in computed}
    ints = {slot: out.fresh_name(f"n{slot}") for slot in view_ints(spec)}
    kept = tuple_of(names.leaves[leaf] for leaf in spec.inputs.tensor_leaves)
    differentiable = ", ".join(names.leaves[leaf] for leaf in differentiable_leaves(spec.interface))
    call = f"apply({items_expression(spec, names)}, {kept}, {differentiable})"
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
