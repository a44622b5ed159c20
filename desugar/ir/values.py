"""What a program's arguments and results are made of, down to plain tensors.

A *value* describes one leaf of the arguments or of the result: a plain tensor, a tensor subclass and the
plain tensors inside it, or something that is no tensor. Values are frozen; the tensors they speak of live
in a flat list beside them, and a value names its place in that list (a *slot*). So the same value says how
to take a live object apart (`unwrap_value`) and how to build it from a list of plain tensors (`wrap_value`),
at trace time with functional tensors and, as generated text, at run time with real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor

from desugar.errors import DesugarError
from desugar.ir.handwritten_classes import flattens_to_constants, is_plainly_built
from subclasses import TensorSubclass
from subclasses._torch import is_traceable_wrapper_subclass

# ---------------------------------------------------------------------------------------------- the records


@dataclass(frozen=True, slots=True)
class Slot:
    """An int that is not constant: place `index` of the flat list holds it."""

    index: int


Int = int | Slot


@dataclass(frozen=True, slots=True)
class Plain:
    """A plain tensor (or parameter), at place `index` of the flat list."""

    index: int
    requires_grad: bool = False
    is_leaf: bool = True


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A tensor subclass and what it is made of.

    Attributes:
        cls: The subclass.
        context: What `__tensor_flatten__` gave beside the names: constant metadata.
        inner: (attribute name, value) per inner tensor, in flatten order, absent ones left out.
        dynamics: (field name, int) per dynamic int of a declared subclass.
        size, stride: The outer size and stride.
        dtype, device: The outer dtype and device.
        requires_grad, is_leaf: Of the outer tensor.
        plainly_built, fixed_flatten: Of a class written by hand: `is_plainly_built` and `flattens_to_constants`
            of `desugar.ir.handwritten_classes`.
    """

    cls: type
    context: Any
    inner: tuple[tuple[str, Value], ...]
    dynamics: tuple[tuple[str, Int], ...]
    size: tuple[Int, ...]
    stride: tuple[Int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False
    is_leaf: bool = True
    plainly_built: bool = False
    fixed_flatten: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """A result leaf that is a view of an argument, or of another result: the view is taken again at run time.

    Attributes:
        of: "input" or "output".
        index: Of the argument leaf, or of the result leaf (hidden ones come after those the user sees).
        replay: `(base, ints) -> view`.
        ints: The sizes, strides and indices that the view was taken with.
        detached: The view is cut off from the autograd graph of its base, which shares its memory.
        no_grad: The view was taken with gradients off.
    """

    of: str
    index: int
    replay: Callable[[Any, Sequence[int]], Any] = field(compare=False)
    ints: tuple[Int, ...] = ()
    detached: bool = False
    no_grad: bool = False


@dataclass(frozen=True, slots=True)
class Constant:
    """A leaf that is no tensor. `index` is set where the leaf is a symbolic number: place in the flat list."""

    value: Any
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Same:
    """A result leaf that is the very object of argument leaf (`of="input"`) or earlier result leaf `index`."""

    of: str
    index: int


Value = Plain | Wrapper | Constant | Same | View


# ------------------------------------------------------------------------------------- taking values apart


@dataclass(slots=True)
class Flat:
    """The flat list under construction: plain tensors, deduplicated by identity, and symbolic ints."""

    items: list[Any] = field(default_factory=list)
    _tensor_slots: dict[int, int] = field(default_factory=dict)
    _symbol_slots: dict[Any, int] = field(default_factory=dict)

    def tensor(self, tensor: Tensor) -> int:
        """The slot of a plain tensor; the same object always has the same slot."""
        if id(tensor) not in self._tensor_slots:
            self._tensor_slots[id(tensor)] = len(self.items)
            self.items.append(tensor)
        return self._tensor_slots[id(tensor)]

    @property
    def known(self) -> Container[int]:
        """Ids of the tensors in the list."""
        return self._tensor_slots

    def again(self, tensor: Tensor) -> int:
        """A further slot for a tensor that has one."""
        self.items.append(tensor)
        return len(self.items) - 1

    def release(self) -> None:
        """Drops the tensors; their slots stay."""
        self.items[:] = [None if isinstance(item, Tensor) else item for item in self.items]
        self._tensor_slots.clear()

    def integer(self, value: int | SymInt) -> Int:
        """A constant, or the slot of a symbolic int; equal expressions share a slot."""
        if not isinstance(value, SymInt):
            return int(value)
        return self.number(value)  # type: ignore[return-value]

    def number(self, value: SymInt | SymFloat | SymBool) -> Int | float:
        """A constant, or the slot of a symbolic number; equal expressions of a kind share a slot."""
        expression = value.node.expr
        if expression.is_number:
            return int(expression) if isinstance(value, SymInt) else float(expression)
        key = type(value), expression
        if key not in self._symbol_slots:
            self._symbol_slots[key] = len(self.items)
            self.items.append(value)
        return Slot(self._symbol_slots[key])


def is_wrapper(value: object) -> bool:
    """Whether `value` is a tensor subclass that can be taken apart."""
    return isinstance(value, Tensor) and is_traceable_wrapper_subclass(value)


def is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is no wrapper whose constructor has yet to set an inner tensor."""
    return not is_wrapper(tensor) or all(hasattr(tensor, name) for name in inner_names(tensor)[0])


def unwrap_value(leaf: object, flat: Flat) -> Value:
    """Takes one leaf apart, adding its plain tensors and symbolic ints to `flat`."""
    if isinstance(leaf, SymBool) and leaf.node.has_hint():
        return Constant(bool(leaf))  # which settles it: another answer is another signature
    if isinstance(leaf, SymInt | SymFloat | SymBool):
        place = flat.number(leaf)
        return Constant(None, place.index) if isinstance(place, Slot) else Constant(place)
    if not isinstance(leaf, Tensor):
        return Constant(leaf)
    if not is_wrapper(leaf):
        return Plain(flat.tensor(leaf), leaf.requires_grad, leaf.is_leaf)
    names, context = inner_names(leaf)
    by_hand = not isinstance(leaf, TensorSubclass)
    return Wrapper(
        cls=type(leaf),
        context=context,
        inner=tuple((name, unwrap_value(getattr(leaf, name), flat)) for name in names),
        dynamics=tuple((name, flat.integer(getattr(leaf, name))) for name in dynamic_names(type(leaf))),
        size=tuple(flat.integer(extent) for extent in leaf.size()),
        stride=tuple(flat.integer(extent) for extent in leaf.stride()),
        dtype=leaf.dtype,
        device=leaf.device,
        requires_grad=leaf.requires_grad,
        is_leaf=leaf.is_leaf,
        plainly_built=by_hand and is_plainly_built(leaf, names, context),
        fixed_flatten=by_hand and flattens_to_constants(type(leaf)),
    )


def inner_names(wrapper: Any) -> tuple[tuple[str, ...], Any]:
    """Names of the inner tensors that are present, and the constant metadata (the interned layout)."""
    if isinstance(wrapper, TensorSubclass):
        layout = wrapper._layout
        return layout.present, layout
    names, context = wrapper.__tensor_flatten__()
    return tuple(names), context


def dynamic_names(cls: type) -> tuple[str, ...]:
    """Names of a declared class's dynamic ints; a class written by hand has none."""
    return tuple(field.name for field in cls.__spec__.dynamics) if issubclass(cls, TensorSubclass) else ()


# --------------------------------------------------------------------------------- building them from parts


def wrap_value(value: Value, flat: Sequence[Any]) -> Any:
    """Builds the leaf a value describes from the flat list, without autograd metadata."""
    match value:
        case Plain(index):
            return flat[index]
        case Constant(_, int(index)):
            return flat[index]
        case Constant(constant):
            return constant
        case Wrapper():
            inner = {name: wrap_value(part, flat) for name, part in value.inner}
            for name, extent in value.dynamics:
                carrier_device = torch.device("cpu")
                inner[f"_{name}_carrier"] = torch.empty((read_int(extent, flat), 0), device=carrier_device)
            size = tuple(read_int(extent, flat) for extent in value.size)
            stride = tuple(read_int(extent, flat) for extent in value.stride)
            return value.cls.__tensor_unflatten__(inner, value.context, size, stride)  # type: ignore[attr-defined]
        case _:
            raise TypeError(f"expected a value that stands on its own, got {value!r}")


def read_int(value: Int, flat: Sequence[Any]) -> Any:
    """A constant as it is, a slot from the flat list."""
    return flat[value.index] if isinstance(value, Slot) else value


# -------------------------------------------------------------------------------------------------- walking


def renumber(value: Value, slots: Sequence[int]) -> Value:
    """A value over other slots."""

    def number(extent: Int) -> Int:
        return Slot(slots[extent.index]) if isinstance(extent, Slot) else extent

    match value:
        case Plain(index):
            return replace(value, index=slots[index])
        case Constant(_, int(index)):
            return replace(value, index=slots[index])
        case Wrapper():
            return replace(
                value,
                inner=tuple((name, renumber(part, slots)) for name, part in value.inner),
                dynamics=tuple((name, number(extent)) for name, extent in value.dynamics),
                size=tuple(map(number, value.size)),
                stride=tuple(map(number, value.stride)),
            )
        case _:
            return value


def slots_of(value: Value) -> Iterator[int]:
    """Slots of the plain tensors a value is built from, in flatten order."""
    match value:
        case Plain(index):
            yield index
        case Wrapper(inner=inner):
            for _, part in inner:
                yield from slots_of(part)
        case _:
            return


def paths_of(value: Value) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(slot, attribute path) of each plain tensor in a value: the path leads from the leaf to the tensor."""
    match value:
        case Plain(index):
            yield index, ()
        case Wrapper(inner=inner):
            for name, part in inner:
                for index, path in paths_of(part):
                    yield index, (name, *path)
        case _:
            return


def requires_grad(value: Value) -> bool:
    """Whether the leaf takes part in autograd."""
    return isinstance(value, Plain | Wrapper) and value.requires_grad


def describe(value: Value, indent: str = "", items: Sequence[Any] = ()) -> str:
    """A value as readable text, one line per tensor; with `items`, plain tensors have their dtype and size."""
    match value:
        case Plain(index, grad):
            item = f": {items[index].dtype} {_ints(items[index].size())}" if items else ""
            return f"{indent}plain tensor #{index}{item}" + (" (requires grad)" if grad else "")
        case Constant(constant, index):
            return f"{indent}{constant!r}" if index is None else f"{indent}int #{index}"
        case Same(of, index):
            return f"{indent}the same object as {of} {index}"
        case View(of, index):
            return f"{indent}a view of {of} {index}"
        case Wrapper():
            head = f"{indent}{value.cls.__name__} size={_ints(value.size)} {value.dtype}"
            head += " (requires grad)" if value.requires_grad else ""
            lines = [
                f"{indent}  .{name}: {describe(part, indent + '  ', items).lstrip()}"
                for name, part in value.inner
            ]
            lines += [f"{indent}  .{name}: int {_ints((extent,))}" for name, extent in value.dynamics]
            return "\n".join([head, *lines])
        case _:
            raise DesugarError(f"unknown value {value!r}", instead="report this as a bug")


def _ints(values: Sequence[Int]) -> str:
    return "(" + ", ".join(f"#{v.index}" if isinstance(v, Slot) else str(v) for v in values) + ")"
