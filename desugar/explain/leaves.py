"""Arguments and results as records: sizes, metadata, and what of them is a symbol."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import SymInt, Tensor, nn

from desugar.explain.records import Leaf, Symbol
from desugar.fakes import hint
from desugar.inputs import Inputs
from desugar.trees import flatten
from desugar.values import Constant, Plain, Same, Slot, Value, View, Wrapper, wrap_value
from subclasses import TensorSubclass

_GUARDED = re.compile(r"\b[tnoa]\d\w*")

# ------------------------------------------------------------------------------------------------------ names


def argument_names(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """What the user calls each leaf of the arguments: a parameter, and the way from it to the leaf."""
    call: Any = (args, dict(kwargs))
    names = _parameters(fn, len(args))
    found = []
    for path in flatten(call)[1].paths():
        side, first, *rest = path
        head = names[first] if side == 0 else str(first)
        found.append(head + "".join(f"[{entry!r}]" for entry in rest))
    return found


def _parameters(fn: Any, count: int) -> list[str]:
    """Names of the positional arguments; one for each that goes into `*args`."""
    target = fn.forward if isinstance(fn, nn.Module) else fn
    names: list[str] = []
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # a builtin tells nothing
        parameters = ()
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{n}]" for n in range(count - len(names))]
        elif parameter.kind is not parameter.KEYWORD_ONLY:
            names.append(parameter.name)
    return names + [f"args[{n}]" for n in range(len(names), count)]


def captured_names(fn: Any, captured: Sequence[Tensor]) -> list[str]:
    """What the user calls tensors that the function reaches without an argument."""
    known: dict[int, str] = {}
    for prefix, holder in _holders(fn):
        if isinstance(holder, Tensor):
            known.setdefault(id(holder), prefix)
        elif isinstance(holder, nn.Module):
            for name, tensor in [*holder.named_parameters(), *holder.named_buffers()]:
                known.setdefault(id(tensor), f"{prefix}.{name}")
    return [known.get(id(tensor), f"captured {n}") for n, tensor in enumerate(captured)]


def _holders(fn: Any) -> Iterator[tuple[str, Any]]:
    """The function's module, closure and globals, by name."""
    if isinstance(fn, nn.Module):
        yield "self", fn
        return
    owner, function = getattr(fn, "__self__", None), getattr(fn, "__func__", fn)
    if owner is not None:
        yield "self", owner
    if inspect.isfunction(function):
        variables = inspect.getclosurevars(function)
        yield from variables.nonlocals.items()
        yield from variables.globals.items()


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


def describe_symbols(inputs: Inputs, leaf_name: Callable[[str, int], str]) -> tuple[Symbol, ...]:
    """The symbols of a program, and where the user finds the value of each."""
    names = _names_in_guards(inputs, leaf_name)
    return tuple(
        Symbol(
            str(symbol),
            _GUARDED.sub(lambda found: names.get(found[0], found[0]), known.text),
            int(hint(known.value)),
        )
        for symbol, known in inputs.fakes.symbols.items()
    )


def _names_in_guards(inputs: Inputs, leaf_name: Callable[[str, int], str]) -> dict[str, str]:
    """What the user calls that of which guards speak as `t3`, `n0_length`, `o0_inner` or, behind Dynamo, `a0`."""
    places = {f"t{slot}": (origin.leaf, origin.path) for slot, origin in inputs.origins.items()}
    places |= inputs.outer_names
    for number, value in enumerate(inputs.values):
        places[f"a{number}"] = number, ()
        places |= {f"n{number}_{'_'.join(path)}": (number, path) for path in _dynamic_paths(value)}
    return {name: ".".join([leaf_name("input", leaf), *path]) for name, (leaf, path) in places.items()}


def _dynamic_paths(value: Value) -> Iterator[tuple[str, ...]]:
    """The attribute path of each dynamic int of an argument."""
    if isinstance(value, Wrapper):
        yield from ((name,) for name, _ in value.dynamics)
        for name, part in value.inner:
            yield from ((name, *path) for path in _dynamic_paths(part))
