"""The generated runtime wrapper of one program, and its autograd function.

One function, `run(a0, a1, ...)`, takes the arguments apart, calls the compiled graph and builds the result.
With a backward, the graph is called inside the forward of a generated `torch.autograd.Function`, which takes
the differentiable *outer* tensors as arguments, so that autograd's edges, hooks and version checks are on
what the user holds; the inner tensors travel beside them in a list that autograd does not look at.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from desugar.backends.choose import CompiledGraph
from desugar.codegen.build_values import Read, emit_constant, emit_graph_call, emit_ints, emit_value
from desugar.codegen.rechecks import Expected, emit_recheck, expect_plain
from desugar.codegen.runtime import check_inference_mode, note_versions, raise_versions
from desugar.codegen.text import negated, targets_of, tuple_of
from desugar.codegen.unpack import Names, emit_unpacking
from desugar.frontend.inputs import Inputs
from desugar.ir.fx_utils import output_nodes
from desugar.ir.storage import are_apart
from desugar.ir.values import Constant, Plain, Same, Slot, Value, View, Wrapper
from desugar.passes.partition import FromForward
from desugar.recording.listeners import note_left_out
from desugar.tracing.outputs import Outputs, unread_positions, written_slots
from desugar.tracing.trace import Traced
from desugar.wrapper.backward import ForwardNames, differentiable_leaves, member_name, plan_backward
from desugar.wrapper.backward_variants import Family
from desugar.wrapper.recompute import Watched, tensor_leaves
from subclasses.codegen.emitter import Emitter

# ------------------------------------------------------------------------------------------------- records


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything the text of one program is made from."""

    inputs: Inputs
    outputs: Outputs
    traced: Traced
    leaves: list[Any]  # the argument leaves that were traced
    forward: CompiledGraph
    family: Family | None = None
    autocast: bool = False
    otherwise: Callable[..., Any] | None = (
        None  # takes calls whose arguments share memory in a way that matters
    )


def emit_program(parts: Parts) -> Emitter:
    """The text of one program: `run`, and before it the autograd function if there is a backward."""
    out = Emitter()
    out.reserve("run", "items", "kept", "ctx", "Backward", "apply", "_")
    if parts.family is not None:
        _emit_function(out, parts, parts.family)
        out.writeline()
        out.writeline()
    _emit_run(out, parts)
    return out


# ------------------------------------------------------------------------------------------------------ run


def _emit_run(out: Emitter, parts: Parts) -> None:
    parameters = [out.fresh_name(f"a{n}") for n in range(len(parts.leaves))]
    out.writeline(f"def run({', '.join(parameters)}):")
    with out.indent():
        names = emit_unpacking(out, parts.inputs, parameters)
        _emit_otherwise(out, parts, names, parameters)
        tensors = tensor_leaves(parts.inputs)
        arguments = Expected(
            "arguments", tuple(parts.inputs.values[n] for n in tensors), parts.inputs.fake_items
        )
        emit_recheck(out, [names.leaves[n] for n in tensors], arguments)
        _emit_inference_check(out, parts, names)
        written = _emit_note_versions(out, parts, names)
        leaves, read = (_emit_training if parts.family else _emit_inference)(out, parts, names)
        for leaf, name, number in parts.outputs.assigns:
            out.writeline(f"{names.leaves[leaf]}.{name} = {leaves[number]}")
        for reshape in parts.outputs.reshapes:
            method = out.bind(reshape.method, reshape.method.__name__)
            arguments = [names.leaves[reshape.leaf], *map(repr, reshape.args)]
            arguments += [f"{name}={argument!r}" for name, argument in reshape.kwargs]
            out.writeline(f"{method}({', '.join(arguments)})")
        for leaf, number in parts.outputs.writes:
            out.writeline(f"{names.leaves[leaf]}.copy_({leaves[number]})")
        if written:
            out.writeline(written)
        _emit_views(out, parts, names, leaves, read)
        out.writeline(f"return {tuple_of(leaves[n] for n in range(len(parts.outputs.visible)))}")


def _emit_otherwise(out: Emitter, parts: Parts, names: Names, parameters: Sequence[str]) -> None:
    """Another program takes the call if a written tensor shares memory with another, or begins elsewhere in it."""
    if parts.otherwise is None:
        return
    conditions = [_apart(out, parts, names), *_offsets(parts, names)]
    found = [condition for condition in conditions if condition]
    if found:
        out.writeline(f"if not ({' and '.join(found)}):" if len(found) > 1 else f"if {negated(found[0])}:")
        with out.indent():
            out.writeline(f"return {out.bind(parts.otherwise, 'another_program')}({', '.join(parameters)})")


def _apart(out: Emitter, parts: Parts, names: Names) -> str | None:
    """That no tensor which is written shares memory with another."""
    inputs = parts.inputs
    written = written_slots(inputs.values, parts.outputs)
    tensors = [n for n, item in inputs.fake_items.items() if isinstance(item, Tensor)]
    if not written or len(tensors) < 2:
        return None
    groups = [
        tuple_of(names.slots[n] for n in tensors if (n in written) is wanted) for wanted in (True, False)
    ]
    return f"{out.bind(are_apart, 'are_apart')}({groups[0]}, {groups[1]})"


def _offsets(parts: Parts, names: Names) -> list[str]:
    """That tensors begin where they did, if the function counts from there."""
    inputs = parts.inputs
    if not inputs.fakes.offsets_matter:
        return []
    offsets = {n: item.storage_offset() for n, item in inputs.fake_items.items() if isinstance(item, Tensor)}
    return [
        f"{names.slots[n]}.storage_offset() == {offset}"
        for n, offset in offsets.items()
        if isinstance(offset, int)
    ]


def _emit_inference_check(out: Emitter, parts: Parts, names: Names) -> None:
    """Has each call asked for its mode if tensors made in inference mode are written, since Dynamo guards no mode."""
    written = written_slots(parts.inputs.values, parts.outputs)
    made_there = [slot for slot in sorted(written) if parts.inputs.flat.items[slot].is_inference()]
    if made_there:
        check = out.bind(check_inference_mode, "check_inference_mode")
        out.writeline(f"{check}({tuple_of(names.slots[slot] for slot in made_there)})")


def _emit_note_versions(out: Emitter, parts: Parts, names: Names) -> str | None:
    """Notes the version counters of what is written; returns the line that raises them afterwards."""
    rises = parts.outputs.versions
    if not rises:
        return None
    written, before = out.fresh_name("written"), out.fresh_name("versions")
    tensors = tuple_of(".".join([names.leaves[leaf], *path]) for leaf, path, _ in rises)
    out.writeline(f"{written} = {tensors}")
    out.writeline(f"{before} = {out.bind(note_versions, 'note_versions')}({written})")
    amounts = tuple_of(rise for _, _, rise in rises)
    return f"{out.bind(raise_versions, 'raise_versions')}({written}, {before}, {amounts})"


def _emit_views(out: Emitter, parts: Parts, names: Names, leaves: dict[int, str], read: Read) -> None:
    """Takes the views among the results; adds their names to `leaves`."""
    for number, value in enumerate(parts.outputs.values):
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
    for number, value in enumerate(parts.outputs.values):
        if isinstance(value, Same) and number not in leaves:
            leaves[number] = leaves[value.index]


def _items(parts: Parts, names: Names) -> str:
    return "[" + ", ".join(names.slots[slot] for slot in range(len(parts.inputs.flat.items))) + "]"


def _emit_inference(out: Emitter, parts: Parts, names: Names) -> tuple[dict[int, str], Read]:
    unread = unread_positions(parts.outputs)
    hints = ["_" if n in unread else f"r{n}" for n in range(parts.traced.num_forward)]
    note_left_out(out, "a walk over the arguments, and a copy of their list: the items are named one by one")
    results = emit_graph_call(out, parts.forward, _items(parts, names), hints, parts.autocast)
    return _emit_results(out, parts, names, results), _reader(parts, names, results)


def _reader(parts: Parts, names: Names, results: Sequence[str]) -> Read:
    """From output slots to expressions."""
    outputs = parts.outputs
    positions = {slot: n for n, slot in enumerate(outputs.returned)}

    def read(slot: int) -> str:
        return names.slots[outputs.inputs[slot]] if slot in outputs.inputs else results[positions[slot]]

    return read


def _emit_results(out: Emitter, parts: Parts, names: Names, results: Sequence[str]) -> dict[int, str]:
    """Writes what builds the results that the graph computes; returns an expression per leaf, views left out."""
    read = _reader(parts, names, results)
    items = parts.outputs.items
    computed = [(text, items[slot]) for text, slot in zip(results, parts.outputs.returned, strict=False)]
    computed = [(text, fake) for text, fake in computed if text != "_"]
    emit_recheck(out, [text for text, _ in computed], expect_plain("results", [fake for _, fake in computed]))
    leaves: dict[int, str] = {}
    for number, value in enumerate(parts.outputs.values):
        match value:
            case View() | Same("output"):
                pass
            case Same(_, index):
                leaves[number] = names.leaves[index]
            case Plain(index, True) if index in parts.outputs.inputs and parts.family:
                leaves[number] = f"{read(index)}.detach()"  # the inner tensor itself never gets a history
            case _:
                leaves[number] = emit_value(out, value, read, f"out{number}")
    for number, value in enumerate(parts.outputs.values):
        if isinstance(value, Same) and value.of == "output" and value.index in leaves:
            leaves[number] = leaves[value.index]
    built = {n: value for n, value in enumerate(parts.outputs.values) if isinstance(value, Wrapper)}
    outputs = Expected("outputs", tuple(built.values()), dict(enumerate(items)))
    emit_recheck(out, [leaves[n] for n in built], outputs)
    return leaves


def _emit_training(out: Emitter, parts: Parts, names: Names) -> tuple[dict[int, str], Read]:
    made = [number for number, value in enumerate(parts.outputs.values) if _from_function(value)]
    leaves = {number: out.fresh_name(f"out{number}") for number in made}
    ints = {slot: out.fresh_name(f"n{slot}") for slot in _view_ints(parts)}
    kept = tuple_of(names.leaves[leaf] for leaf in tensor_leaves(parts.inputs))
    differentiable = ", ".join(names.leaves[leaf] for leaf in differentiable_leaves(parts.traced))
    call = f"apply({_items(parts, names)}, {kept}, {differentiable})"
    note_left_out(out, "a walk over the arguments, and a copy of their list: the items are named one by one")
    out.writeline(f"{', '.join([*leaves.values(), *ints.values()])} = {call}")
    for number, value in enumerate(parts.outputs.values):
        match value:
            case Same("input", index):
                leaves[number] = names.leaves[index]
            case Same(_, index) if index in leaves:
                leaves[number] = leaves[index]
            case Constant(constant, None):
                leaves[number] = emit_constant(out, constant)
    inputs = parts.outputs.inputs
    return leaves, lambda slot: names.slots[inputs[slot]] if slot in inputs else ints[slot]


def _view_ints(parts: Parts) -> list[int]:
    """Output slots of ints that views are taken with and that the graph computes."""
    slots = [
        extent.index
        for value in parts.outputs.values
        if isinstance(value, View)
        for extent in value.ints
        if isinstance(extent, Slot)
    ]
    return [slot for slot in dict.fromkeys(slots) if slot not in parts.outputs.inputs]


def _from_function(value: Value) -> bool:
    """Whether a result leaf comes out of the autograd function."""
    return isinstance(value, Plain | Wrapper) or (isinstance(value, Constant) and value.index is not None)


# ------------------------------------------------------------------------------------- the autograd function


def _emit_function(out: Emitter, parts: Parts, family: Family) -> None:
    """Writes `class Backward(torch.autograd.Function)`."""
    function = out.bind(torch.autograd.Function, "Function")
    out.writeline(f"class Backward({function}):")
    with out.indent():
        out.writeline("@staticmethod")
        out.writeline("def forward(ctx, items, kept, *differentiable):")
        with out.indent():
            _emit_forward(out, parts, family)
        out.writeline()
        out.writeline("@staticmethod")
        arriving = {number: f"tangent{number}" for number, _ in parts.traced.tangents}
        made = [number for number, value in enumerate(parts.outputs.values) if _from_function(value)]
        parameters = [arriving.get(number) or out.fresh_name("_unused") for number in made]
        parameters += [out.fresh_name("_unused") for _ in _view_ints(parts)]  # autograd has None for an int
        family.is_replacing = len(parameters) == len(arriving)
        note = (
            f"  # until {member_name((True,) * len(arriving))} takes its place" if family.is_replacing else ""
        )
        out.writeline(f"def backward(ctx, {', '.join(parameters)}):{note}")
        with out.indent():
            present = ", ".join(f"{name} is not None" for name in arriving.values())
            present += "," * (len(arriving) == 1)
            members = out.bind(family.members, "backwards")
            out.writeline(f"return {members}[{present}](ctx, {', '.join(arriving.values())})")
    out.writeline()
    out.writeline()
    note_left_out(out, "a look for functorch transforms: under one, guards do not match")
    out.writeline(f"apply = super({function}, Backward).apply")


def _emit_forward(out: Emitter, parts: Parts, family: Family) -> None:
    names = _emit_names_in_forward(out, parts)
    count = len(output_nodes(family.partitioned.forward))
    read_later = {s.index for s in family.partitioned.backward_inputs if isinstance(s, FromForward)}
    unread = unread_positions(parts.outputs)
    results = emit_graph_call(
        out,
        parts.forward,
        "items",
        ["_" if n in unread - read_later else f"r{n}" for n in range(count)],
        parts.autocast,
    )
    leaves = _emit_results(out, parts, names, results)
    plan = plan_backward(parts.inputs, parts.traced, family.partitioned, ForwardNames(names, results, leaves))
    family.plan = plan
    watched = family.differentiation.watch(plan, parts.leaves)
    if plan.saved:
        out.writeline(f"ctx.save_for_backward({', '.join(plan.saved)})")
    for attribute in ("ints", "sizes", "companions"):
        if values := getattr(plan, attribute):
            out.writeline(f"ctx.{attribute} = {tuple_of(values)}")
    _emit_record(out, watched, names)
    out.writeline("ctx.set_materialize_grads(False)")
    made = [(leaves[n], value) for n, value in enumerate(parts.outputs.values) if _from_function(value)]
    fixed = [leaf for leaf, value in made if isinstance(value, Plain | Wrapper) and not value.requires_grad]
    if fixed:
        out.writeline(f"ctx.mark_non_differentiable({', '.join(fixed)})")
    read = _reader(parts, names, results)
    returned = [leaf for leaf, _ in made] + [read(slot) for slot in _view_ints(parts)]
    out.writeline(f"return {returned[0] if len(returned) == 1 else tuple_of(returned)}")


def _emit_names_in_forward(out: Emitter, parts: Parts) -> Names:
    """Unpacks what the forward reads besides handing it to the graph."""
    leaves = {leaf: out.fresh_name(f"x{leaf}") for leaf in tensor_leaves(parts.inputs)}
    slots = {slot: out.fresh_name(f"i{slot}") for slot in range(len(parts.inputs.flat.items))}
    out.writeline(f"{targets_of(leaves.values())} = kept")
    out.writeline(f"{targets_of(slots.values())} = items")
    return Names([leaves.get(n, "None") for n in range(len(parts.inputs.values))], slots)


def _emit_record(out: Emitter, watched: Watched, names: Names) -> None:
    """Notes, without keeping anything alive, what another differentiation of the call would start from."""
    if watched.referred:
        ref = out.bind(weakref.ref, "ref")
        entries = []
        for n in watched.referred:
            name = names.leaves[n]
            entries.append(
                f"{ref}({name}) if {name}.is_leaf else {name}" if n in watched.held else f"{ref}({name})"
            )
        out.writeline(f"ctx.alive = {tuple_of(entries)}")
    if watched.versioned:
        versions = tuple_of(f"{names.leaves[n]}._version" for n in watched.versioned)
        out.writeline(f"ctx.versions = {versions}")
    if watched.numbers:
        numbers = tuple_of(names.slots[slot] for slot in watched.numbers)
        out.writeline(f"ctx.numbers = {numbers}")
