"""Emits the autograd function of a program.

The forward of a generated `torch.autograd.Function` calls the compiled graph. Its arguments are the differentiable
*outer* tensors, so autograd's edges, hooks and version checks are on the tensors that the user holds. The inner
tensors are in a list, which autograd does not inspect.
"""

from __future__ import annotations

import weakref

import torch

from desugar.backward.emit import BackwardPlan, plan_backward, variant_name
from desugar.backward.recompute import plan_recompute
from desugar.codegen.build_values import emit_graph_call, emit_results, is_computed, slot_reader, view_ints
from desugar.codegen.text import block, targets_of, tuple_of
from desugar.codegen.unpack import Names
from desugar.ir.stages import Compiled, FromForward, ProgramSpec, Split
from desugar.ir.values import Plain, Wrapper
from desugar.recording.listeners import note_skipped_check
from subclasses.codegen.emitter import Emitter


def emit_function(out: Emitter, compiled: Compiled, split: Split) -> BackwardPlan:
    """Emits `class Backward(torch.autograd.Function)`, whose global `backwards` is the table of variants."""
    spec = compiled.spec
    function = out.bind(torch.autograd.Function, "Function")
    with block(out, f"class Backward({function}):"):
        out.writeline("@staticmethod")
        with block(out, "def forward(ctx, items, kept, *differentiable):"):
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


def _emit_forward(out: Emitter, compiled: Compiled, split: Split) -> BackwardPlan:
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
    """Emits the lines that unpack `kept` and `items`; returns the names of input leaves and input slots."""
    leaves = {leaf: out.fresh_name(f"x{leaf}") for leaf in spec.inputs.tensor_leaves}
    slots = {slot: out.fresh_name(f"i{slot}") for slot in range(len(spec.inputs.items))}
    out.writeline(f"{targets_of(leaves.values())} = kept")
    out.writeline(f"{targets_of(slots.values())} = items")
    return Names([leaves.get(n, "None") for n in range(len(spec.inputs.values))], slots)


def _emit_reference(out: Emitter, plan: BackwardPlan, n: int, name: str) -> str:
    if n in plan.kept:
        return name
    weak = f"{out.bind(weakref.ref, 'ref')}({name})"
    return f"{weak} if {name}.is_leaf else {name}" if n in plan.held else weak


def _emit_recompute_record(out: Emitter, plan: BackwardPlan, names: Names) -> None:
    """Emits the lines that record the objects by which a backward can run the function again.

    Arguments are recorded by weak reference, except the leaves in `plan.kept`, and the non-leaves of autograd in
    `plan.held`.
    """
    if plan.referred:
        entries = [_emit_reference(out, plan, n, names.leaves[n]) for n in plan.referred]
        out.writeline(f"ctx.alive = {tuple_of(entries)}")
    if plan.versioned:
        versions = tuple_of(f"{names.leaves[n]}._version" for n in plan.versioned)
        out.writeline(f"ctx.versions = {versions}")
