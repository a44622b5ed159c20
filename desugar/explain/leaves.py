"""Arguments and results as records: sizes, metadata, and what of them is a symbol."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import SymInt, Tensor

from desugar.explain.records import Leaf, Symbol
from desugar.frontend.fakes import hint
from desugar.frontend.inputs import Inputs
from desugar.ir.values import Constant, Plain, Same, Slot, Value, View, Wrapper, wrap_value
from subclasses import TensorSubclass

_PARAMETER = re.compile(r"\ba(\d+)\b")  # what generated text calls an argument

# ------------------------------------------------------------------------------------------------- the leaves


def describe_leaf(
    name: str, value: Value, items: Callable[[int], Any], leaf_name: Callable[[str, int], str]
) -> Leaf:
    """One leaf.

    Args:
        name: What it is called.
        value: What it is made of.
        items: Slot -> fake tensor or int.
        leaf_name: ("input" or "output", number) -> name of another leaf.
    """
    match value:
        case Plain(index):
            return _tensor(name, "Tensor", items(index), value.requires_grad)
        case Wrapper():
            return _wrapper(name, value, items, leaf_name)
        case Same(of, index):
            return Leaf(name, "same", note=f"the very object {leaf_name(of, index)}")
        case View(of, index):
            note = f"a view of {leaf_name(of, index)}, taken again at each call"
            return Leaf(name, "view", note=note + (", cut off from its gradient" if value.detached else ""))
        case Constant(_, int(index)):
            return Leaf(name, "int", note=extent_text(items(index)))
        case Constant(constant):
            return Leaf(name, "constant", note=_short(constant))
        case _:
            raise TypeError(f"unknown value {value!r}")


def _tensor(name: str, kind: str, fake: Any, requires_grad: bool) -> Leaf:
    if not isinstance(fake, Tensor):
        return Leaf(name, "int", note=extent_text(fake))
    size = tuple(extent_text(extent) for extent in fake.size())
    return Leaf(name, kind, size, _dtype(fake.dtype), str(fake.device), requires_grad)


def _wrapper(
    name: str, value: Wrapper, items: Callable[[int], Any], leaf_name: Callable[[str, int], str]
) -> Leaf:
    def read(extent: Any) -> str:  # a slot, an int, or a symbol
        return extent_text(items(extent.index) if isinstance(extent, Slot) else extent)

    return Leaf(
        name,
        value.cls.__name__,
        tuple(map(read, value.size)),
        _dtype(value.dtype),
        str(value.device),
        value.requires_grad,
        metadata=_metadata(value),
        dynamics=tuple((field, read(extent)) for field, extent in value.dynamics),
        inner=tuple(describe_leaf(field, part, items, leaf_name) for field, part in value.inner),
    )


def _metadata(value: Wrapper) -> tuple[tuple[str, str], ...]:
    if issubclass(value.cls, TensorSubclass):
        names = [field.name for field in value.cls.__spec__.statics]  # type: ignore[attr-defined]
        return tuple(
            (name, _short(static)) for name, static in zip(names, value.context.statics, strict=True)
        )
    return () if value.context is None else (("flatten context", _short(value.context)),)


def extent_text(extent: Any) -> str:
    """An int as it is, a symbol with the value that it had."""
    return f"{extent} ({hint(extent)} here)" if isinstance(extent, SymInt) else str(extent)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# ------------------------------------------------------------------------------------------- outer sizes, symbols


def with_outer_symbols(value: Value, inputs: Inputs) -> Value:
    """An argument with its outer size in the symbols of its inner tensors; a declared class computes it from them."""
    if not isinstance(value, Wrapper):
        return value
    inner = tuple((name, with_outer_symbols(part, inputs)) for name, part in value.inner)
    if not issubclass(value.cls, TensorSubclass) or any(isinstance(extent, Slot) for extent in value.size):
        return replace(value, inner=inner)
    with torch.no_grad(), inputs.fakes.mode:
        size = tuple(wrap_value(value, inputs.primals()).size())
    return replace(value, inner=inner, size=size)


def slot_names(inputs: Inputs, names: Sequence[str]) -> list[str]:
    """What the user calls each flat input: the attribute path to a tensor, how the value of an int is read.

    Args:
        inputs: What a program was traced with.
        names: What the user calls the arguments.
    """
    found = []
    for slot in range(len(inputs.flat.items)):
        origin = inputs.origins[slot]
        if origin.text is not None:
            found.append(_PARAMETER.sub(lambda parameter: names[int(parameter[1])], origin.text))
        elif slot in inputs.bases:
            found.append("the memory that some arguments share")
        else:
            found.append(".".join([names[origin.leaf], *origin.path]))
    return found


def describe_symbols(inputs: Inputs, sources: Sequence[str]) -> tuple[Symbol, ...]:
    """The symbols of a program; `sources` says by slot where the user finds the value of each."""
    found: dict[str, Symbol] = {}
    for slot, source in enumerate(sources):
        item = inputs.fake_items[slot]
        if isinstance(item, SymInt):
            found.setdefault(str(item), Symbol(str(item), source, int(hint(item))))
    return tuple(found.values())
