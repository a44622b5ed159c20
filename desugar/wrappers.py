"""The generated runtime wrapper of one program, and its autograd function.

One function, `run(args, kwargs)`, checks the signature and, straight on, takes the arguments apart, calls the
compiled graph and builds the result. With a backward, the graph is called inside the forward of a generated
`torch.autograd.Function`, which takes the differentiable *outer* tensors as arguments, so that autograd's edges,
hooks and version checks are on what the user holds; the inner tensors travel beside them in a list that
autograd does not look at.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from desugar.arguments import Unpacking
from desugar.backward import ForwardNames, differentiable_leaves, plan_backward
from desugar.compilers import CompiledGraph
from desugar.family import Family, tensor_leaves
from desugar.graphs import output_nodes
from desugar.inputs import Inputs
from desugar.results import emit_constant, emit_graph_call, emit_result, emit_value, same_leaf
from desugar.signature import Names, SignatureEmitter, State, TrustedEmitter
from desugar.trace import Outputs, Traced
from desugar.values import Constant, Plain, Same, Value, Wrapper
from subclasses.emit import Emitter

# ------------------------------------------------------------------------------------------------- records


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything the text of one program is made from."""

    inputs: Inputs
    outputs: Outputs
    traced: Traced
    state: State
    leaves: list[Any]  # the argument leaves that were traced
    unpacking: Unpacking
    forward: CompiledGraph
    family: Family | None = None
    autocast: bool = False
    trusted: bool = False  # somebody else has checked the signature


def emit_program(parts: Parts) -> Emitter:
    """The text of one program: `run`, and before it the autograd function if there is a backward."""
    out = Emitter()
    out.reserve("run", "args", "kwargs", "items", "kept", "ctx", "Backward", *_guard_names(parts.inputs))
    if parts.family is not None:
        _emit_function(out, parts, parts.family)
        out.writeline()
        out.writeline()
    _emit_run(out, parts)
    return out


def _guard_names(inputs: Inputs) -> list[str]:
    return [name for name, _ in inputs.fakes.guarded]


# ------------------------------------------------------------------------------------------------------ run


def _emit_run(out: Emitter, parts: Parts) -> None:
    out.writeline("def run(args, kwargs):")
    with out.indent():
        emitter = TrustedEmitter if parts.trusted else SignatureEmitter
        signature = emitter(out, parts.inputs, parts.state)
        leaf_names = parts.unpacking.emit(out, signature.require)
        names = signature.emit(leaf_names, parts.leaves)
        if parts.family is None:
            _emit_inference(out, parts, names)
        else:
            _emit_training(out, parts, names)


def _items(parts: Parts, names: Names) -> str:
    return "[" + ", ".join(names.slots[slot] for slot in range(len(parts.inputs.flat.items))) + "]"


def _emit_inference(out: Emitter, parts: Parts, names: Names) -> None:
    results = _emit_forward_call(out, parts, _items(parts, names), parts.traced.num_forward)
    leaves = _emit_results(out, parts, names, results)
    out.writeline(f"return {emit_result(out, parts.outputs.treespec, leaves)}")


def _emit_forward_call(out: Emitter, parts: Parts, items: str, count: int) -> list[str]:
    return emit_graph_call(out, parts.forward, items, [f"r{n}" for n in range(count)], parts.autocast)


def _emit_results(out: Emitter, parts: Parts, names: Names, results: Sequence[str]) -> list[str]:
    """Writes what builds the results; returns one expression per leaf."""
    outputs = parts.outputs
    positions = {slot: n for n, slot in enumerate(outputs.returned)}

    def read(slot: int) -> str:
        return names.slots[outputs.inputs[slot]] if slot in outputs.inputs else results[positions[slot]]

    leaves: list[str] = []
    for number, value in enumerate(outputs.values):
        if isinstance(value, Same):
            leaves.append(same_leaf(value, names.leaves, leaves))
        else:
            leaves.append(emit_value(out, value, read, f"out{number}"))
    return leaves


def _emit_training(out: Emitter, parts: Parts, names: Names) -> None:
    made = [number for number, value in enumerate(parts.outputs.values) if _from_function(value)]
    targets = {number: out.fresh_name(f"out{number}") for number in made}
    kept = ", ".join(names.leaves[leaf] for leaf in tensor_leaves(parts.inputs))
    differentiable = ", ".join(names.leaves[leaf] for leaf in differentiable_leaves(parts.traced))
    call = f"Backward.apply({_items(parts, names)}, ({kept},), {differentiable})"
    target = ", ".join(targets[number] for number in made)
    out.writeline(f"{target} = {call}")
    leaves: list[str] = []
    for number, value in enumerate(parts.outputs.values):
        if isinstance(value, Same):
            leaves.append(same_leaf(value, names.leaves, leaves))
        elif isinstance(value, Constant) and value.index is None:
            leaves.append(emit_constant(out, value.value))
        else:
            leaves.append(targets[number])
    out.writeline(f"return {emit_result(out, parts.outputs.treespec, leaves)}")


def _from_function(value: Value) -> bool:
    """Whether a result leaf comes out of the autograd function."""
    return isinstance(value, Plain | Wrapper) or (isinstance(value, Constant) and value.index is not None)


# ------------------------------------------------------------------------------------- the autograd function


def _emit_function(out: Emitter, parts: Parts, family: Family) -> None:
    """Writes `class Backward(torch.autograd.Function)`."""
    out.writeline(f"class Backward({out.bind(torch.autograd.Function, 'Function')}):")
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
        out.writeline(f"def backward(ctx, {', '.join(parameters)}):")
        with out.indent():
            present = "".join(f"{name} is not None, " for name in arriving.values()).rstrip()
            members = out.bind(family.members, "backwards")
            out.writeline(f"return {members}[{present}](ctx, {', '.join(arriving.values())})")


def _emit_forward(out: Emitter, parts: Parts, family: Family) -> None:
    names = _emit_names_in_forward(out, parts)
    count = len(output_nodes(family.partitioned.forward))
    results = _emit_forward_call(out, parts, "items", count)
    leaves = _emit_results(out, parts, names, results)
    plan = plan_backward(parts.inputs, parts.traced, family.partitioned, ForwardNames(names, results, leaves))
    family.plan = plan
    if plan.saved:
        out.writeline(f"ctx.save_for_backward({', '.join(plan.saved)})")
    for attribute in ("ints", "sizes", "companions"):
        if values := getattr(plan, attribute):
            out.writeline(f"ctx.{attribute} = ({', '.join(values)},)")
    _emit_record(out, parts, family, names)
    out.writeline("ctx.set_materialize_grads(False)")
    pairs = list(zip(leaves, parts.outputs.values, strict=True))
    fixed = [leaf for leaf, value in pairs if isinstance(value, Plain | Wrapper) and not value.requires_grad]
    if fixed:
        out.writeline(f"ctx.mark_non_differentiable({', '.join(fixed)})")
    made = [leaf for leaf, value in pairs if _from_function(value)]
    out.writeline(f"return {made[0] if len(made) == 1 else '(' + ', '.join(made) + ')'}")


def _emit_names_in_forward(out: Emitter, parts: Parts) -> Names:
    """Unpacks what the forward reads besides handing it to the graph."""
    leaves = {leaf: out.fresh_name(f"x{leaf}") for leaf in tensor_leaves(parts.inputs)}
    slots = {slot: out.fresh_name(f"i{slot}") for slot in range(len(parts.inputs.flat.items))}
    out.writeline(f"({', '.join(leaves.values())},) = kept")
    out.writeline(f"({', '.join(slots.values())},) = items")
    return Names([leaves.get(n, "None") for n in range(len(parts.inputs.values))], slots)


def _emit_record(out: Emitter, parts: Parts, family: Family, names: Names) -> None:
    """Notes, without keeping anything alive, what another differentiation of the call would start from."""
    watched = family.watch(parts.leaves)
    if watched.referred:
        ref = out.bind(weakref.ref, "ref")
        out.writeline(f"ctx.alive = ({' '.join(f'{ref}({names.leaves[n]}),' for n in watched.referred)})")
    if watched.versioned:
        versions = " ".join(f"{names.leaves[n]}._version," for n in watched.versioned)
        out.writeline(f"ctx.versions = ({versions})")
    if watched.numbers:
        numbers = " ".join(f"{names.slots[slot]}," for slot in watched.numbers)
        out.writeline(f"ctx.numbers = ({numbers})")
