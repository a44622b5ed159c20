"""Text that takes the arguments of a program apart.

Whoever calls a program has proved that its arguments have the types, layouts and sizes that were traced: Dynamo's
guards, or a lookup by those facts (:mod:`desugar.dynamo.specialize`). So the text reads attributes and checks nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from desugar.frontend.inputs import Inputs
from desugar.ir.storage import whole_storage
from desugar.ir.values import Plain, Value, Wrapper
from desugar.recording.listeners import note_left_out
from subclasses.codegen.emitter import Emitter


@dataclass(slots=True)
class Names:
    """Names in the generated text: of input leaves and of flat inputs."""

    leaves: list[str] = field(default_factory=list)
    slots: dict[int, str] = field(default_factory=dict)


def emit_unpacking(out: Emitter, inputs: Inputs, parameters: Sequence[str]) -> Names:
    """Writes what reads every flat input; `parameters` hold the argument leaves."""
    note_left_out(out, "the whole signature: guards have matched before this is called")
    captured = [out.bind(tensor, "captured") for tensor in inputs.captured]
    names = Names([*parameters, *captured])
    for name, value in zip(names.leaves, inputs.values, strict=True):
        _emit_leaf(out, names, name, value)
    for base, slots in inputs.bases.items():
        names.slots[base] = out.fresh_name("storage")
        whole = out.bind(whole_storage, "whole_storage")
        out.writeline(f"{names.slots[base]} = {whole}({names.slots[slots[0]]})")
    for slot, origin in inputs.origins.items():
        if origin.text is not None:
            names.slots[slot] = out.fresh_name(f"s{slot}")
            out.writeline(f"{names.slots[slot]} = {origin.text}")
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
