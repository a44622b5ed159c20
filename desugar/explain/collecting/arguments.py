"""Describes arguments and results as records: sizes, metadata, symbols."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import SymInt, Tensor

from desugar.explain.collecting.names import Names
from desugar.explain.records import Leaf, Symbol
from desugar.ir.abstract_values import hint
from desugar.ir.values import Constant, Plain, Same, Slot, Value, View, Wrapper, wrap_value
from subclasses import TensorSubclass
from subclasses.layout import field_name


def describe_inputs(names: Names, *, captured: bool) -> tuple[Leaf, ...]:
    """Returns the arguments from parameters, or the captured leaves; see `Names.arguments`."""
    items = dict(enumerate(names.inputs.items))
    values = names.arguments(captured=captured)
    return tuple(_leaf(name, value, items, names, is_input=True) for name, value in values.items())


def describe_results(names: Names) -> tuple[Leaf, ...]:
    """Returns the results that the function returns to the user."""
    items = dict(enumerate(names.outputs.items))
    return tuple(_leaf(name, value, items, names) for name, value in names.results().items())


def _leaf(name: str, value: Value, items: Mapping[int, Any], names: Names, is_input: bool = False) -> Leaf:
    match value:
        case Plain(index) if isinstance(items[index], Tensor):
            fake = items[index]
            size = tuple(map(extent_text, fake.size()))
            return Leaf(name, "Tensor", size, dtype_text(fake), str(fake.device), value.requires_grad)
        case Plain(index) | Constant(_, int(index)):
            return Leaf(name, "int", note=extent_text(items[index]))
        case Wrapper():
            return Leaf(
                name,
                value.cls.__name__,
                tuple(_extent(extent, items) for extent in _outer_size(value, names, is_input)),
                dtype_text(value),
                str(value.device),
                value.requires_grad,
                metadata=tuple(_metadata(value)),
                dynamics=tuple((field, _extent(extent, items)) for field, extent in value.dynamics),
                inner=tuple(
                    _leaf(field_name(field), part, items, names, is_input) for field, part in value.inner
                ),
            )
        case Same():
            return Leaf(name, "same", note=f"the very object {names.of_source(value)}")
        case View(detached=detached):
            note = f"a view of {names.of_source(value)}, taken again at each call"
            return Leaf(name, "view", note=note + (", cut off from its gradient" if detached else ""))
        case Constant(constant):
            return Leaf(name, "constant", note=_short(constant))
        case _:
            raise TypeError(f"unknown value {value!r}")


def _outer_size(value: Wrapper, names: Names, is_input: bool) -> Sequence[Any]:
    """Returns the outer size; for an argument, its class computes the size from its inner tensors and their symbols."""
    is_computed = issubclass(value.cls, TensorSubclass) and not any(isinstance(e, Slot) for e in value.size)
    if not is_input or not is_computed:
        return value.size
    with torch.no_grad(), names.mode:
        return wrap_value(value, names.inputs.items).size()


def _metadata(value: Wrapper) -> Iterator[tuple[str, str]]:
    if issubclass(value.cls, TensorSubclass):
        fields = value.cls.__spec__.statics  # type: ignore[attr-defined]
        for field, static in zip(fields, value.context.statics, strict=True):
            yield field.name, _short(static)
    elif value.context is not None:
        yield "flatten context", _short(value.context)


def _extent(extent: Any, items: Mapping[int, Any]) -> str:
    """Formats a slot, an int or a symbol."""
    return extent_text(items[extent.index] if isinstance(extent, Slot) else extent)


def extent_text(extent: Any) -> str:
    """Formats an int unchanged, and a symbol with its value in the compiled call."""
    return f"{extent} ({hint(extent)} here)" if isinstance(extent, SymInt) else str(extent)


def dtype_text(tensor: Any) -> str:
    """Returns the dtype of a tensor, or of the record of one, without `torch.`."""
    return str(tensor.dtype).removeprefix("torch.")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def describe_symbols(names: Names, sources: Sequence[str]) -> tuple[Symbol, ...]:
    """Returns the symbols of a program; `sources` are the user's names of the flat inputs."""
    symbols: dict[str, Symbol] = {}
    for item, source in zip(names.inputs.items, sources, strict=True):
        if isinstance(item, SymInt):
            symbols.setdefault(str(item), Symbol(str(item), source, int(hint(item))))
    return tuple(symbols.values())
