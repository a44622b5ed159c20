"""Emits the text that builds results and gradients from plain tensors.

Once guards have matched, the structure of a result is known: class, constant metadata, which inner tensors are
present, how the outer size follows from them. So the text contains one constructor call with constants per wrapper,
and one store per inner tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from desugar import _torch as torch_private
from desugar.codegen.debug_checks import Expected, emit_recheck, expect_plain
from desugar.codegen.text import block, targets_of, tuple_of
from desugar.codegen.unpack import Names
from desugar.ir.stages import ProgramSpec
from desugar.ir.values import Constant, Int, Plain, Same, Slot, Value, View, Wrapper
from desugar.recording.listeners import note_skipped_check
from subclasses import TensorSubclass
from subclasses._torch import make_wrapper_subclass
from subclasses.handwritten import LOCAL, DTensorContext, OpaqueContext
from subclasses.layout import BY_FORMULA
from subclasses.source_text.emitter import Emitter

ReadSlot = Callable[[int], str]  # slot -> expression

_DEVICES: dict[torch.device, torch.device] = {}  # one object per device, so that a text binds it once

# ------------------------------------------------------------------------------------------------- one leaf


def emit_value(out: Emitter, value: Value, read: ReadSlot, hint: str) -> str:
    """Emits the lines that build one leaf; returns the leaf's expression.

    Args:
        out: Receives the lines.
        value: The structure of the leaf.
        read: Returns the expression of a slot.
        hint: The preferred name of the leaf.
    """
    match value:
        case Plain(index):
            return read(index)
        case Constant(_, int(index)):
            return read(index)
        case Constant(constant):
            return emit_constant(out, constant)
        case Wrapper() if issubclass(value.cls, TensorSubclass):
            return _emit_declared(out, value, read, hint)
        case Wrapper():
            return _emit_handwritten(out, value, read, hint)
        case _:
            raise TypeError(f"{value!r} is not built from tensors")


def emit_constant(out: Emitter, constant: object) -> str:
    """Returns a literal for None, bool, int and str; binds any other constant and returns its name."""
    if constant is None or isinstance(constant, (bool, int, str)):
        return repr(constant)
    return out.bind(constant, "constant")


def _emit_declared(out: Emitter, value: Wrapper, read: ReadSlot, hint: str) -> str:
    parts = {name: emit_value(out, part, read, f"{hint}_{name}") for name, part in value.inner}
    fields = {field.attribute: parts.get(field.attribute, "None") for field in value.cls.__spec__.inners}  # type: ignore[attr-defined]
    fields |= {name: emit_int(extent, read) for name, extent in value.dynamics}
    result, attributes = out.fresh_name(hint), out.fresh_name(f"{hint}_dict")
    note_skipped_check(
        out, f"the checks of {value.cls.__name__}(...): dtypes and sizes are those that were traced"
    )
    out.writeline(f"{result} = {_constructor(out, value, read)}")
    out.writeline(f"{attributes} = {result}.__dict__")
    for name, text in fields.items():
        out.writeline(f'{attributes}["{name}"] = {text}')
    out.writeline(f'{attributes}["_layout"] = {out.bind(value.context, "layout")}')
    if value.by_formula:
        out.writeline(f'{attributes}["{BY_FORMULA}"] = True')
    return result


def _constructor(out: Emitter, value: Wrapper, read: ReadSlot) -> str:
    make, cls = (
        out.bind(make_wrapper_subclass, "make_wrapper_subclass"),
        out.bind(value.cls, value.cls.__name__),
    )
    # Positional arguments: size, stride, offset, memory format, dtype, layout, device. Keywords cost 25% more time;
    # a stride that is torch's default costs 10% more than None.
    stride = "None" if _is_default_stride(value) else emit_ints(value.stride, read)
    extents = f"{emit_ints(value.size, read)}, {stride}, None, None"
    dtype, strided = out.bind(value.dtype, str(value.dtype)[6:]), out.bind(torch.strided, "strided")
    device = out.bind(_DEVICES.setdefault(value.device, value.device), value.device.type)
    return f"{make}({cls}, {extents}, {dtype}, {strided}, {device})"


def _is_default_stride(value: Wrapper) -> bool:
    is_constant = all(type(extent) is int for extent in (*value.size, *value.stride))
    return is_constant and torch.empty(value.size, device="meta").stride() == value.stride  # type: ignore[arg-type]


def _emit_handwritten(out: Emitter, value: Wrapper, read: ReadSlot, hint: str) -> str:
    parts = {name: emit_value(out, part, read, f"{hint}_{name}") for name, part in value.inner}
    result = out.fresh_name(hint)
    if value.plainly_built:
        out.writeline(f"{result} = {_constructor(out, value, read)}")
        for name, text in parts.items():
            out.writeline(f"{result}.{name} = {text}")
        return result
    if isinstance(value.context, DTensorContext):
        return _emit_dtensor(out, value, parts, read, result)
    own = value.context
    if isinstance(own, OpaqueContext):
        parts |= {name: out.bind(part, name) for name, part in own.parts}
        own = own.context
    context = emit_constant(out, own)
    inner = ", ".join(f'"{name}": {text}' for name, text in parts.items())
    extents = f"{emit_ints(value.size, read)}, {emit_ints(value.stride, read)}"
    cls = out.bind(value.cls, value.cls.__name__)
    out.writeline(f"{result} = {cls}.__tensor_unflatten__({{{inner}}}, {context}, {extents})")
    return result


def _emit_dtensor(out: Emitter, value: Wrapper, parts: dict[str, str], read: ReadSlot, result: str) -> str:
    """Emits the construction of a `DTensor`; a constant size has a constant spec."""
    context, extents = value.context, (*value.size, *value.stride)
    if all(type(extent) is int for extent in extents):
        spec = out.bind(context.spec_of(value.size, value.stride), "spec")
    else:
        spec = f"{out.bind(context.spec_of, 'spec_of')}({emit_ints(value.size, read)}, {emit_ints(value.stride, read)})"
    # `DTensor.__init__` does nothing, and takes twice as long as the rest.
    make, cls = out.bind(value.cls.__new__, "make_dtensor"), out.bind(value.cls, value.cls.__name__)
    out.writeline(f"{result} = {make}({cls}, {parts[LOCAL]}, {spec}, requires_grad=False)")
    return result


# --------------------------------------------------------------------------------------------------- graphs


def emit_graph_call(
    out: Emitter, compiled: object, items: str, hints: Sequence[str], autocast: bool
) -> list[str]:
    """Emits the call of a compiled graph.

    Args:
        out: Receives the lines.
        compiled: The compiled graph.
        items: The expression of the list that the graph takes.
        hints: The preferred name of each output; `_` for an output that nothing reads.
        autocast: Whether autocast is on for some device; the call then disables it.

    Returns:
        The names of the outputs; `_` stays `_`.
    """
    names = [text if text == "_" else out.fresh_name(text) for text in hints]
    target = f"{targets_of(names)} = " if names else ""
    call = f"{target}{out.bind(compiled, 'compiled_graph')}({items})"
    if not autocast:
        out.writeline(call)
        return names
    with block(
        out, f"with {out.bind(torch_private.DisableAutocast, 'DisableAutocast')}():  # casts are in the graph"
    ):
        out.writeline(call)
    return names


# ------------------------------------------------------------------------------------------------- results


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


# ------------------------------------------------------------------------------------------- ints and zeros


def emit_int(extent: Int, read: ReadSlot) -> str:
    """Returns a literal, or the expression of the int's slot."""
    return read(extent.index) if isinstance(extent, Slot) else str(extent)


def emit_ints(extents: Sequence[Int], read: ReadSlot) -> str:
    """Returns the expression of a tuple of ints."""
    return tuple_of(emit_int(extent, read) for extent in extents)


def zeros_expression(out: Emitter, fake: torch.Tensor, size: str) -> str:
    """Returns the expression of zeros for a missing tangent, with the dtype and device of `fake`.

    Args:
        out: Binds the names.
        fake: The fake tangent.
        size: The expression of the size.
    """
    zeros = out.bind(torch.zeros, "zeros")
    dtype, device = (
        out.bind(fake.dtype, str(fake.dtype)[6:]),
        out.bind(_DEVICES.setdefault(fake.device, fake.device), fake.device.type),
    )
    return f"{zeros}({size}, dtype={dtype}, device={device})"
