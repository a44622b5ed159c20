"""Records of a program's arguments and results, down to plain tensors.

A *value* describes one pytree leaf of the arguments or of the result: a plain tensor, a tensor subclass with the plain
tensors inside it, or an object that is not a tensor. Values are frozen and hold no tensors. The plain tensors are in a
separate flat list, and a value holds their indices in that list (*slots*: input slots or output slots).
`unwrap_value` makes a value from a live object; `wrap_value` rebuilds the object from a value and a flat list of plain
tensors. Tracing rebuilds objects from functional tensors; at run time, generated text rebuilds them from real tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor

from subclasses import TensorSubclass
from subclasses._torch import is_traceable_wrapper_subclass
from subclasses.adoption.flatten_purity import flattens_to_constants
from subclasses.handwritten import (
    DTensorContext,
    OpaqueContext,
    flatten_handwritten,
    is_bare,
    unflatten,
)
from subclasses.layout import BY_FORMULA, field_name

# ---------------------------------------------------------------------------------------------- the records


@dataclass(frozen=True, slots=True)
class Slot:
    """An int that is not constant: item `index` of the flat list."""

    index: int


Int = int | Slot


@dataclass(frozen=True, slots=True)
class Plain:
    """A plain tensor (or parameter): item `index` of the flat list. `is_leaf` is True for an autograd leaf."""

    index: int
    requires_grad: bool = False
    is_leaf: bool = True


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A tensor subclass and its inner tensors.

    Attributes:
        cls: The subclass.
        context: The constant that rebuilds the wrapper (see `take_apart`).
        inner: (attribute name, value) per present inner tensor, in flatten order.
        dynamics: (field name, int) per dynamic int of a declared class.
        size, stride: The outer size and stride.
        dtype, device: The outer dtype and device.
        requires_grad, is_leaf: Whether the outer tensor requires grad, and whether it is an autograd leaf.
        by_formula: Whether a rule for an op of a representation made it, so that its gradient is plain.
        plainly_built, fixed_flatten: For a handwritten class, the results of `_is_plainly_built` and
            `flattens_to_constants`; False for a declared class.
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
    by_formula: bool = False
    plainly_built: bool = False
    fixed_flatten: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """A result leaf that is a view of an input leaf or of another result; the runtime wrapper takes the view again.

    Attributes:
        of: The kind of the base: "input" or "output".
        index: The index of the base among the input leaves, or among the results (hidden results follow the result
            leaves that the user gets).
        replay: `(base, ints) -> view`.
        ints: The sizes, strides and indices of the view.
        detached: The view shares the base's memory, but is detached from the base's autograd graph.
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
    """A leaf that is not a tensor. For a symbolic number, `index` is its slot and `value` is None."""

    value: Any
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Same:
    """A leaf that is the same object as input leaf `index` (`of="input"`) or as earlier result leaf `index`."""

    of: str
    index: int


Value = Plain | Wrapper | Constant | Same | View


# ---------------------------------------------------------------------------------------- unwrapping values


@dataclass(slots=True)
class Flat:
    """A flat list under construction: plain tensors, deduplicated by identity, and symbolic numbers."""

    items: list[Any] = field(default_factory=list)
    _tensor_slots: dict[int, int] = field(default_factory=dict)
    _symbol_slots: dict[Any, int] = field(default_factory=dict)

    def tensor(self, tensor: Tensor) -> int:
        """Returns the slot of a plain tensor, added if it is new; the same object always has the same slot."""
        known = self._tensor_slots.get(id(tensor))
        return self.add(tensor) if known is None else known

    def add(self, tensor: Tensor) -> int:
        """Adds a tensor under a new slot, even if the list already holds it; :meth:`tensor` returns its first slot."""
        slot = len(self.items)
        self._tensor_slots.setdefault(id(tensor), slot)
        self.items.append(tensor)
        return slot

    def release(self) -> None:
        """Drops the tensors; the slots of all items are unchanged."""
        self.items[:] = [None if isinstance(item, Tensor) else item for item in self.items]
        self._tensor_slots.clear()

    def integer(self, value: int | SymInt) -> Int:
        """Returns the slot of a symbolic int; a constant unchanged. Equal expressions share a slot."""
        return self.number(value) if isinstance(value, SymInt) else int(value)  # type: ignore[return-value]

    def number(self, value: SymInt | SymFloat | SymBool) -> Int | float:
        """Returns the slot of a symbolic number, or its value if its expression is constant.

        Equal expressions of the same type share a slot.
        """
        expression = value.node.expr
        if expression.is_number:
            return int(expression) if isinstance(value, SymInt) else float(expression)
        key = type(value), expression
        if key not in self._symbol_slots:
            self._symbol_slots[key] = len(self.items)
            self.items.append(value)
        return Slot(self._symbol_slots[key])


def is_wrapper(value: object) -> bool:
    """Returns whether `value` is a traceable wrapper subclass."""
    return isinstance(value, Tensor) and is_traceable_wrapper_subclass(value)


def is_constructed(tensor: Tensor) -> bool:
    """Returns False for a wrapper under construction, which lacks an inner tensor; True for any other tensor."""
    if not is_wrapper(tensor):
        return True
    is_declared = isinstance(tensor, TensorSubclass)
    names = tensor._layout.present if is_declared else tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    return all(hasattr(tensor, name) for name in names)


def unwrap_value(leaf: object, flat: Flat) -> Value:
    """Unwraps one leaf: adds its plain tensors and symbolic numbers to `flat` and returns its value."""
    if isinstance(leaf, SymBool) and leaf.node.has_hint():
        return Constant(
            bool(leaf)
        )  # bool() adds a guard, so a call with the other value gets another program
    if isinstance(leaf, SymInt | SymFloat | SymBool):
        number = flat.number(leaf)
        return Constant(None, number.index) if isinstance(number, Slot) else Constant(number)
    if not isinstance(leaf, Tensor):
        return Constant(leaf)
    if not is_wrapper(leaf):
        return Plain(flat.tensor(leaf), leaf.requires_grad, leaf.is_leaf)
    names, context = take_apart(leaf)
    is_handwritten = not isinstance(leaf, TensorSubclass)
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
        by_formula=BY_FORMULA in leaf.__dict__,
        plainly_built=is_handwritten and _is_plainly_built(leaf, names, context),
        fixed_flatten=is_handwritten and flattens_to_constants(type(leaf)),
    )


def _is_plainly_built(leaf: Any, names: tuple[str, ...], context: Any) -> bool:
    """Returns whether one `_make_wrapper_subclass` and one store per inner tensor replace `__tensor_unflatten__`.

    The function rebuilds `leaf` with that method and checks the result.
    """
    cls = type(leaf)
    if isinstance(context, DTensorContext | OpaqueContext):
        return False
    inner = {name: getattr(leaf, name) for name in names}
    return is_bare(cls.__tensor_unflatten__(dict(inner), context, leaf.size(), leaf.stride()), cls, inner)


def take_apart(wrapper: Any) -> tuple[tuple[str, ...], Any]:
    """Returns the names of the present inner tensors, and the constant that rebuilds the wrapper around others.

    The constant of a declared class is its interned layout.
    """
    if isinstance(wrapper, TensorSubclass):
        layout = wrapper._layout
        return layout.present, layout
    return flatten_handwritten(wrapper)


def inner_names(wrapper: Any) -> tuple[str, ...]:
    """Returns the names of the attributes that hold the present inner tensors."""
    return take_apart(wrapper)[0]


def plain_parts(tensor: Any) -> list[Any]:
    """Returns the plain tensors inside a tensor, at any depth; a plain tensor is its only part."""
    if not is_wrapper(tensor):
        return [tensor]
    return [part for name in inner_names(tensor) for part in plain_parts(getattr(tensor, name))]


def dynamic_names(cls: type) -> tuple[str, ...]:
    """Returns the names of a declared class's dynamic ints; a handwritten class has none."""
    return tuple(field.name for field in cls.__spec__.dynamics) if issubclass(cls, TensorSubclass) else ()


# ------------------------------------------------------------------------------------------ wrapping values


def wrap_value(value: Value, flat: Sequence[Any]) -> Any:
    """Builds the leaf that a value describes from a flat list, without autograd metadata.

    Raises:
        TypeError: The value is a :class:`Same` or a :class:`View`, which refers to another leaf.
    """
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
            return unflatten(value.cls, inner, value.context, size, stride)
        case _:
            raise TypeError(f"expected a value that refers to no other leaf, got {value!r}")


def read_int(value: Int, flat: Sequence[Any]) -> Any:
    """Returns the item of the flat list for a :class:`Slot`; a constant unchanged."""
    return flat[value.index] if isinstance(value, Slot) else value


# ---------------------------------------------------------------------------------------- traversing values


def renumber(value: Value, slots: Sequence[int]) -> Value:
    """Returns a copy of a value in which each slot `n` becomes `slots[n]`."""

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
    """Returns the slots of the plain tensors in a value, in flatten order."""
    return (slot for slot, _ in paths_of(value))


def parts_of(value: Value) -> Iterator[tuple[Value, tuple[str, ...]]]:
    """Yields (part, attribute path from the leaf) of each part of a value that is not a wrapper."""
    if isinstance(value, Wrapper):
        for name, inner in value.inner:
            yield from ((part, (name, *path)) for part, path in parts_of(inner))
    else:
        yield value, ()


def paths_of(value: Value) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Returns (slot, attribute path from the leaf to the tensor) of each plain tensor in a value."""
    return ((part.index, path) for part, path in parts_of(value) if isinstance(part, Plain))


def requires_grad(value: Value) -> bool:
    """Returns whether the leaf of a value is a tensor that requires grad."""
    return isinstance(value, Plain | Wrapper) and value.requires_grad


def describe(value: Value, indent: str = "") -> str:
    """Formats a value as text, one line per tensor."""
    match value:
        case Plain(index, grad):
            return f"{indent}plain tensor #{index}" + (" (requires grad)" if grad else "")
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
                f"{indent}  .{field_name(name)}: {describe(part, indent + '  ').lstrip()}"
                for name, part in value.inner
            ]
            lines += [f"{indent}  .{name}: int {_ints((extent,))}" for name, extent in value.dynamics]
            return "\n".join([head, *lines])


def kind_of(value: Value) -> str:
    """Formats the kind of a value as a word or two: the class of a tensor, the type of a constant."""
    match value:
        case Plain():
            return "Tensor"
        case Wrapper():
            return value.cls.__name__
        case Constant(constant, index):
            return type(constant).__name__ if index is None else "int"
        case Same(of, index):
            return f"{of} {index}"
        case View(of, index):
            return f"view of {of} {index}"


def _ints(values: Sequence[Int]) -> str:
    return "(" + ", ".join(f"#{v.index}" if isinstance(v, Slot) else str(v) for v in values) + ")"
