"""Emits the text that unwraps the arguments of a program.

Before a program is called, its arguments are known to have the traced types, layouts and sizes: Dynamo's guards have
matched, or a lookup by these properties found the program (:class:`desugar.dynamo.backend.Specialized`). So the text
reads attributes and checks nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from desugar.ir.stages import CompiledGraphs
from desugar.ir.values import Plain, Value, Wrapper
from desugar.recording.listeners import note_skipped_check
from subclasses.source_text.emitter import Emitter


@dataclass(slots=True)
class Names:
    """Names in the generated text.

    Attributes:
        leaves: The names of the input leaves.
        slots: Input slot -> name.
    """

    leaves: list[str] = field(default_factory=list)
    slots: dict[int, str] = field(default_factory=dict)


def emit_unpacking(out: Emitter, compiled: CompiledGraphs, parameters: Sequence[str]) -> Names:
    """Emits the lines that read the tensor or int of every input slot; returns the names.

    Args:
        out: Receives the lines.
        compiled: The program; captured tensors are bound.
        parameters: The names of the argument leaves.
    """
    note_skipped_check(out, "the whole signature: guards have matched before this is called")
    inputs = compiled.spec.inputs
    captured = [out.bind(tensor, "captured") for tensor in compiled.captured]
    names = Names([*parameters, *captured])
    for name, value in zip(names.leaves, inputs.values, strict=True):
        _emit_leaf(out, names, name, value)
    for slot, origin in enumerate(inputs.origins):
        if origin.is_symbol:
            names.slots[slot] = out.fresh_name(f"s{slot}")
            out.writeline(
                f"{names.slots[slot]} = {origin.expression(names.leaves[origin.leaf], *origin.path)}"
            )
    return names


def _emit_leaf(out: Emitter, names: Names, name: str, value: Value) -> None:
    match value:
        case Plain(index):
            names.slots.setdefault(index, name)
        case Wrapper(inner=inner):
            for field_name, part in inner:
                local = out.fresh_name(f"{name}_{field_name}")
                out.writeline(f"{local} = {name}.{field_name}")
                _emit_leaf(out, names, local, part)
        case _:
            return
