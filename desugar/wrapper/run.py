"""Emits the runtime wrapper of one program: `run(a0, a1, ...)`.

`run` unwraps the arguments, calls the compiled graph or the autograd function around it, and builds the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from desugar.backward.emit import differentiable_leaves
from desugar.backward.plan import BackwardPlan
from desugar.backward.recompute import tensor_leaves
from desugar.codegen.build_values import ReadSlot, emit_constant, emit_graph_call, emit_ints
from desugar.codegen.debug_checks import Expected, emit_recheck
from desugar.codegen.parts import Parts
from desugar.codegen.runtime import check_inference_mode, note_versions, raise_versions
from desugar.codegen.text import tuple_of
from desugar.codegen.unpack import Names, emit_unpacking
from desugar.ir.outputs import unread_positions, written_slots
from desugar.ir.storage import are_apart
from desugar.ir.values import Constant, Same, Value, View, Wrapper
from desugar.recording.listeners import note_skipped_check
from desugar.wrapper.autograd_function import emit_function
from desugar.wrapper.results import (
    emit_results,
    is_computed,
    items_expression,
    slot_reader,
    view_ints,
)
from subclasses.codegen.emitter import Emitter
from subclasses.handwritten import DTensorContext


def emit_program(parts: Parts) -> tuple[Emitter, BackwardPlan | None]:
    """Emits the text of one program: the autograd function if there is a backward, then `run`.

    Returns:
        The text, and the plan of the backward; None in inference.
    """
    out = Emitter()
    out.reserve("run", "items", "kept", "ctx", "Backward", "backwards", "apply", "_")
    plan = None
    if parts.partitioned is not None:
        plan = emit_function(out, parts, parts.partitioned)
        out.writeline()
        out.writeline()
    _emit_run(out, parts)
    return out, plan


def _emit_run(out: Emitter, parts: Parts) -> None:
    parameters = [out.fresh_name(f"a{n}") for n in range(parts.inputs.num_arguments)]
    out.writeline(f"def run({', '.join(parameters)}):")
    with out.indent():
        names = emit_unpacking(out, parts.inputs, parameters)
        _emit_unguarded_checks(out, parts, names, parameters)
        tensors = tensor_leaves(parts.inputs)
        arguments = Expected(
            "arguments", tuple(parts.inputs.values[n] for n in tensors), parts.inputs.fake_items
        )
        emit_recheck(out, [names.leaves[n] for n in tensors], arguments)
        _emit_inference_check(out, parts, names)
        raise_line = _emit_version_reads(out, parts, names)
        leaves, read = (_emit_training if parts.partitioned else _emit_inference)(out, parts, names)
        for leaf, name, number in parts.traced.outputs.assigns:
            out.writeline(f"{names.leaves[leaf]}.{name} = {leaves[number]}")
        for leaf, number in parts.traced.outputs.writes:
            out.writeline(f"{names.leaves[leaf]}.copy_({leaves[number]})")
        if raise_line:
            out.writeline(raise_line)
        _emit_views(out, parts, names, leaves, read)
        out.writeline(f"return {tuple_of(leaves[n] for n in range(len(parts.traced.outputs.visible)))}")


def _emit_unguarded_checks(out: Emitter, parts: Parts, names: Names, parameters: Sequence[str]) -> None:
    """Emits the call of `otherwise` where a property that Dynamo does not guard differs.

    These properties are the memory that a mutated tensor shares, storage offsets, and sizes of whole DTensors.
    """
    differences = [*_overlaps(out, parts, names), *_other_offsets(parts, names)]
    differences += _other_whole_sizes(out, parts, names)
    if differences:
        out.writeline(f"if {' or '.join(differences)}:")
        with out.indent():
            out.writeline(f"return {out.bind(parts.otherwise, 'otherwise')}({', '.join(parameters)})")


def _overlaps(out: Emitter, parts: Parts, names: Names) -> list[str]:
    """Returns the condition that a mutated tensor shares memory with another tensor; an empty list if no tensor can."""
    inputs = parts.inputs
    written = written_slots(inputs.values, parts.traced.outputs)
    tensors = [n for n, item in inputs.fake_items.items() if isinstance(item, Tensor)]
    if not written or len(tensors) < 2:
        return []
    mutated = tuple_of(names.slots[n] for n in tensors if n in written)
    others = tuple_of(names.slots[n] for n in tensors if n not in written)
    return [f"not {out.bind(are_apart, 'are_apart')}({mutated}, {others})"]


def _other_offsets(parts: Parts, names: Names) -> list[str]:
    """Returns the conditions that tensors have other storage offsets than in the trace, if the program uses offsets."""
    inputs = parts.inputs
    if not inputs.fakes.offsets_matter:
        return []
    offsets = {n: item.storage_offset() for n, item in inputs.fake_items.items() if isinstance(item, Tensor)}
    return [
        f"{names.slots[n]}.storage_offset() != {offset}"
        for n, offset in offsets.items()
        if isinstance(offset, int)
    ]


def _other_whole_sizes(out: Emitter, parts: Parts, names: Names) -> list[str]:
    """Returns the conditions that DTensors have other sizes than in the trace; Dynamo guards only local tensors.

    An unevenly sharded tensor may have the same local tensor for two sizes, on some ranks.
    """
    leaves = enumerate(parts.inputs.values)
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


def _emit_inference_check(out: Emitter, parts: Parts, names: Names) -> None:
    """Emits a check of inference mode if the program writes to inference tensors: Dynamo does not guard the mode."""
    inputs, written = parts.inputs, written_slots(parts.inputs.values, parts.traced.outputs)
    inference = [slot for slot in sorted(written) if inputs.origins[slot] in inputs.inference]
    if inference:
        check = out.bind(check_inference_mode, "check_inference_mode")
        out.writeline(f"{check}({tuple_of(names.slots[slot] for slot in inference)})")


def _emit_version_reads(out: Emitter, parts: Parts, names: Names) -> str | None:
    """Emits the lines that read the version counters of mutated tensors; returns the line that raises them later."""
    rises = parts.traced.outputs.versions
    if not rises:
        return None
    written, before = out.fresh_name("written"), out.fresh_name("versions")
    tensors = tuple_of(".".join([names.leaves[leaf], *path]) for leaf, path, _ in rises)
    out.writeline(f"{written} = {tensors}")
    out.writeline(f"{before} = {out.bind(note_versions, 'note_versions')}({written})")
    amounts = tuple_of(rise for _, _, rise in rises)
    return f"{out.bind(raise_versions, 'raise_versions')}({written}, {before}, {amounts})"


def _emit_views(out: Emitter, parts: Parts, names: Names, leaves: dict[int, str], read: ReadSlot) -> None:
    """Emits the lines that take the views among the results; adds their names to `leaves`."""
    for number, value in enumerate(parts.traced.outputs.values):
        if not isinstance(value, View):
            continue
        base = names.leaves[value.index] if value.of == "input" else leaves[value.index]
        base = f"{base}.detach()" if value.detached else base
        leaves[number] = name = out.fresh_name(f"out{number}")
        line = f"{name} = {out.bind(value.replay, 'take_view')}({base}, {emit_ints(value.ints, read)})"
        if value.no_grad:
            out.writeline(f"with {out.bind(torch.no_grad, 'no_grad')}():")
            with out.indent():
                out.writeline(line)
        else:
            out.writeline(line)
    for number, value in enumerate(parts.traced.outputs.values):
        if isinstance(value, Same) and number not in leaves:
            leaves[number] = leaves[value.index]


def _emit_inference(out: Emitter, parts: Parts, names: Names) -> tuple[dict[int, str], ReadSlot]:
    unread = unread_positions(parts.traced.outputs)
    hints = ["_" if n in unread else f"r{n}" for n in range(parts.traced.num_forward)]
    note_skipped_check(
        out, "a walk over the arguments, and a copy of their list: the items are named one by one"
    )
    results = emit_graph_call(out, parts.forward, items_expression(parts, names), hints, parts.autocast)
    return emit_results(out, parts, names, results), slot_reader(parts, names, results)


def _emit_training(out: Emitter, parts: Parts, names: Names) -> tuple[dict[int, str], ReadSlot]:
    computed = [number for number, value in enumerate(parts.traced.outputs.values) if is_computed(value)]
    leaves = {number: out.fresh_name(f"out{number}") for number in computed}
    ints = {slot: out.fresh_name(f"n{slot}") for slot in view_ints(parts)}
    kept = tuple_of(names.leaves[leaf] for leaf in tensor_leaves(parts.inputs))
    differentiable = ", ".join(names.leaves[leaf] for leaf in differentiable_leaves(parts.traced))
    call = f"apply({items_expression(parts, names)}, {kept}, {differentiable})"
    note_skipped_check(
        out, "a walk over the arguments, and a copy of their list: the items are named one by one"
    )
    out.writeline(f"{', '.join([*leaves.values(), *ints.values()])} = {call}")
    for number, value in enumerate(parts.traced.outputs.values):
        match value:
            case Same("input", index):
                leaves[number] = names.leaves[index]
            case Same(_, index) if index in leaves:
                leaves[number] = leaves[index]
            case Constant(constant, None):
                leaves[number] = emit_constant(out, constant)
    inputs = parts.traced.outputs.inputs
    return leaves, lambda slot: names.slots[inputs[slot]] if slot in inputs else ints[slot]
