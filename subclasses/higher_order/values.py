"""Operands and results of a higher-order op: values of declared classes as plain tensors.

Every higher-order op takes plain tensors. Each wrapper, including nested ones, is flattened to its inner tensors and,
for each dynamic int, its carrier, a zero-element tensor. Both directions are differentiable: :func:`unwrap_value` reads
inner tensors as :meth:`TensorSubclass.unwrap` does, and :func:`wrap_value` constructs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subclasses.autograd import construct
from subclasses.layout import Layout
from subclasses.spec.values import carrier, is_declared, make_carrier

# ---- one value ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plain:
    """A tensor that is not of a declared class, or an int; it is a leaf itself."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A value without a tensor, such as an absent inner tensor."""

    value: Any


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A value of a declared class: its inner tensors in order of declaration, then the carriers of dynamic ints."""

    layout: Layout
    parts: tuple[Part, ...]


Part = Plain | Constant | Wrapper


def unwrap_value(value: Any, leaves: list[Any]) -> Part:
    """Describes a value, and appends its plain tensors and ints to ``leaves`` as differentiable functions of it."""
    if value is None:
        return Constant(None)
    if not is_declared(value):
        leaves.append(value)
        return Plain()
    spec = type(value).__spec__
    inners = construct.unwrap(value, spec.attributes)
    carriers = [_find_carrier(value, f.name) for f in spec.dynamics]
    return Wrapper(value._layout, tuple(unwrap_value(t, leaves) for t in (*inners, *carriers)))


def _find_carrier(x: Any, name: str) -> Tensor:
    """Returns the carrier of a dynamic int, and creates one if there is none or a compiler supplied another kind."""
    stored = x.__dict__.get(carrier(name))
    return stored if stored is not None and stored.dtype is torch.uint8 else make_carrier(x, x.__dict__[name])


def with_carriers(value: Any) -> Any:
    """Creates the carriers of a value and its inner tensors, from which Dynamo reads dynamic ints after a branch."""
    if is_declared(value):
        for inner in [getattr(value, name) for name in value.__tensor_flatten__()[0]]:
            with_carriers(inner)
    return value


def wrap_value(part: Part, leaves: Iterator[Any]) -> Any:
    """Rebuilds a value from the next leaves, as a differentiable function of them."""
    match part:
        case Plain():
            return next(leaves)
        case Constant(value):
            return value
        case Wrapper(layout, parts):
            values = [wrap_value(p, leaves) for p in parts]
            num_inners = len(layout.cls.__spec__.inners)  # type: ignore[attr-defined]
            dynamics = tuple(t.size(0) for t in values[num_inners:])
            return construct.construct(layout, dynamics, *values[:num_inners])


def num_leaves(part: Part) -> int:
    """Returns the number of plain tensors and ints in a value."""
    return sum(map(num_leaves, part.parts)) if isinstance(part, Wrapper) else isinstance(part, Plain)


def describe(part: Part, leaves: Iterator[Any]) -> str:
    """Describes a value for an error message: ``Pair(a=float32[3], b=float32[3])``, ``float32[2, 3]``."""
    match part:
        case Plain():
            leaf = next(leaves)
            if not isinstance(leaf, Tensor):
                return str(leaf)
            kind = "" if type(leaf).__module__.startswith("torch") else f"{type(leaf).__name__} "
            return f"{kind}{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        case Constant(value):
            return str(value)
        case Wrapper(layout, parts):
            spec = layout.cls.__spec__  # type: ignore[attr-defined]
            shown = [describe(p, leaves) for p in parts[: len(spec.inners)]]
            shown = [f"{name}={text}" for name, text in zip(spec.inner_names, shown, strict=True)]
            shown += [f"{f.name}={value!r}" for f, value in zip(spec.statics, layout.statics, strict=True)]
            shown += [f"{f.name}={next(leaves).size(0)}" for f in spec.dynamics]
            return f"{layout.cls.__name__}({', '.join(shown)})"


# ---- several values ----------------------------------------------------------------------------------------


class Operands:
    """The flattened operands of a higher-order op; identical tensors are one operand.

    Attributes:
        unique: the unique operands.
        plain: the plain operands: tensors and ints of the operands, identical tensors once.
        is_operand: for each plain operand, whether it is an operand itself and not only an inner tensor of one.
    """

    def __init__(
        self, values: Iterable[Any], others: Iterable[Any] = (), differentiable: bool = False
    ) -> None:
        """Flattens values, differentiably on request; symbolic sizes of ``others`` become operands too."""
        self.unique, self._indices = deduplicate(values)
        leaves: list[Any] = []
        with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
            self._parts = [unwrap_value(v, leaves) for v in self.unique]
        self.plain, self._leaf_slots = deduplicate([*leaves, *_symbolic_sizes([*self.unique, *others])])
        itself = {id(value) for value in self.unique}
        self.is_operand = [id(leaf) in itself for leaf in self.plain]

    def wrap_unique(self, plain: Sequence[Any]) -> list[Any]:
        """Rebuilds the unique operands from other plain operands."""
        leaves = iter([plain[n] for n in self._leaf_slots])
        return [wrap_value(part, leaves) for part in self._parts]

    def wrap(self, plain: Sequence[Any]) -> list[Any]:
        """Rebuilds the operands in their original order from other plain operands."""
        return self.repeat(self.wrap_unique(plain))

    def repeat(self, unique: Sequence[Any]) -> list[Any]:
        """Returns all operands in their original order, from the unique ones."""
        return [unique[n] for n in self._indices]


def _symbolic_sizes(values: Iterable[Any]) -> list[torch.SymInt]:
    """Returns the symbols in the outer sizes of wrappers, as additional operands of a function over plain tensors.

    A compiler requires that each symbol in the size of an operand (offsets of size ``B + 1``) is itself an operand or
    the size of one. That holds for the tensors that Dynamo passed to the op, but not for their inner tensors.
    """
    sizes = [size for value in values if is_declared(value) for size in value.shape]
    return list({str(size): size for size in sizes if isinstance(size, torch.SymInt)}.values())


def deduplicate(values: Iterable[Any]) -> tuple[list[Any], list[int]]:
    """Removes repeated tensors; also returns the index of each value among the unique ones. Ints are all kept."""
    unique: list[Any] = []
    first: dict[int, int] = {}
    indices = []
    for value in values:
        index = first.setdefault(id(value), len(unique)) if isinstance(value, Tensor) else len(unique)
        if index == len(unique):
            unique.append(value)
        indices.append(index)
    return unique, indices
