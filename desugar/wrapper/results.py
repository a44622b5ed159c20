"""Emits the parts that the text of a call and of an autograd function's forward share."""

from __future__ import annotations

from collections.abc import Sequence

from desugar.codegen.build_values import ReadSlot, emit_value
from desugar.codegen.debug_checks import Expected, emit_recheck, expect_plain
from desugar.codegen.unpack import Names
from desugar.ir.stages import ProgramSpec
from desugar.ir.values import Constant, Plain, Same, Slot, Value, View, Wrapper
from subclasses.codegen.emitter import Emitter


def items_expression(spec: ProgramSpec, names: Names) -> str:
    """Returns the expression of the list that the compiled graph takes."""
    return "[" + ", ".join(names.slots[slot] for slot in range(len(spec.inputs.items))) + "]"


def slot_reader(spec: ProgramSpec, names: Names, results: Sequence[str]) -> ReadSlot:
    """Returns a function from output slots to expressions.

    Args:
        spec: The program.
        names: The names of input leaves and input slots.
        results: The names of the compiled graph's outputs.
    """
    inputs, positions = spec.outputs.inputs, spec.outputs.positions

    def read(slot: int) -> str:
        return names.slots[inputs[slot]] if slot in inputs else results[positions[slot]]

    return read


def emit_results(out: Emitter, spec: ProgramSpec, names: Names, results: Sequence[str]) -> dict[int, str]:
    """Emits the lines that build the results which the graph computes.

    Args:
        out: Receives the lines.
        spec: The program.
        names: The names of input leaves and input slots.
        results: The names of the compiled graph's outputs.

    Returns:
        Result leaf -> expression, for all leaves except views.
    """
    read = slot_reader(spec, names, results)
    items = spec.outputs.items
    computed = [(text, items[slot]) for text, slot in zip(results, spec.outputs.positions, strict=False)]
    computed = [(text, fake) for text, fake in computed if text != "_"]
    emit_recheck(out, [text for text, _ in computed], expect_plain("results", [fake for _, fake in computed]))
    leaves: dict[int, str] = {}
    for number, value in enumerate(spec.outputs.values):
        match value:
            case View() | Same("output"):
                pass
            case Same(_, index):
                leaves[number] = names.leaves[index]
            case Plain(index, True) if index in spec.outputs.inputs and spec.split:
                leaves[number] = f"{read(index)}.detach()"  # an inner tensor never gets a grad_fn
            case _:
                leaves[number] = emit_value(out, value, read, f"out{number}")
    for number, value in enumerate(spec.outputs.values):
        if isinstance(value, Same) and value.of == "output" and value.index in leaves:
            leaves[number] = leaves[value.index]
    built = {n: value for n, value in enumerate(spec.outputs.values) if isinstance(value, Wrapper)}
    outputs = Expected("outputs", tuple(built.values()), dict(enumerate(items)))
    emit_recheck(out, [leaves[n] for n in built], outputs)
    return leaves


def view_ints(spec: ProgramSpec) -> list[int]:
    """Returns the output slots of ints that the graph computes and that views among the results need."""
    slots = [
        extent.index
        for value in spec.outputs.values
        if isinstance(value, View)
        for extent in value.ints
        if isinstance(extent, Slot)
    ]
    return [slot for slot in dict.fromkeys(slots) if slot not in spec.outputs.inputs]


def is_computed(value: Value) -> bool:
    """Whether the autograd function returns a result leaf."""
    return isinstance(value, Plain | Wrapper) or (isinstance(value, Constant) and value.index is not None)
