"""Values of declared classes as plain tensors: the operands and the results of a higher-order op.

Each wrapper becomes its inner tensors, nested wrappers theirs, and for each dynamic int the zero-element tensor that
carries it, since plain tensors are what every higher-order op takes. Both ways are differentiable:
:func:`unwrap_value` reads inner tensors as :meth:`TensorSubclass.unwrap` does, and :func:`wrap_value` constructs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subclasses.autograd import construct
from subclasses.layout import Layout
from subclasses.spec.values import carrier, make_carrier

# ---- one value ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plain:
    """A tensor of no declared class, or an int: it stays what it is."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A value that no tensor holds, such as an absent inner tensor."""

    value: Any


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A value of a declared class: its inner tensors in order of declaration, then the carriers of dynamic ints."""

    layout: Layout
    parts: tuple[Part, ...]


Part = Plain | Constant | Wrapper


def is_declared(value: Any) -> bool:
    """Whether a value is a tensor of a declared class."""
    return isinstance(value, Tensor) and hasattr(type(value), "__spec__")


def unwrap_value(value: Any, leaves: list[Any]) -> Part:
    """Describes a value and appends the plain tensors and ints in it, as differentiable functions of it."""
    if value is None:
        return Constant(None)
    if not is_declared(value):
        leaves.append(value)
        return Plain()
    spec = type(value).__spec__
    inners = construct.unwrap(value, spec.inner_names)
    carriers = [_carrier_of(value, f.name) for f in spec.dynamics]
    return Wrapper(value._layout, tuple(unwrap_value(t, leaves) for t in (*inners, *carriers)))


def _carrier_of(x: Any, name: str) -> Tensor:
    """The carrier of a dynamic int; made anew where there is none, or one of another kind that a compiler supplied."""
    held = x.__dict__.get(carrier(name))
    return held if held is not None and held.dtype is torch.uint8 else make_carrier(x, x.__dict__[name])


def with_carriers(value: Any) -> Any:
    """A value whose dynamic ints can be read off tensors, as Dynamo does where a branch decides on them."""
    if is_declared(value):
        for inner in [getattr(value, name) for name in value.__tensor_flatten__()[0]]:
            with_carriers(inner)
    return value


def wrap_value(part: Part, leaves: Iterator[Any]) -> Any:
    """The value again, around the next of some leaves and as a differentiable function of them."""
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
    """How many plain tensors and ints a value consists of."""
    return sum(map(num_leaves, part.parts)) if isinstance(part, Wrapper) else isinstance(part, Plain)


def describe(part: Part, leaves: Iterator[Any]) -> str:
    """A value in a message: ``Pair(a=float32[3], b=float32[3])``, ``float32[2, 3]``."""
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


# ---- several -----------------------------------------------------------------------------------------------


class Operands:
    """The operands of a higher-order op, taken apart; identical tensors are one operand.

    Attributes:
        once: each operand once.
        plain: the plain operands: the tensors and ints in them.
        own: per plain operand, whether it is an operand itself, not an inner tensor of one.
    """

    def __init__(
        self, values: Iterable[Any], others: Iterable[Any] = (), differentiable: bool = False
    ) -> None:
        """Takes apart values, perhaps differentiably; the symbolic sizes of others are operands too."""
        self.once, self._places = without_repetition(values)
        leaves: list[Any] = []
        with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
            self._parts = [unwrap_value(v, leaves) for v in self.once]
        self.plain, self._leaf_places = without_repetition([*leaves, *_symbolic_sizes([*self.once, *others])])
        itself = {id(value) for value in self.once}
        self.own = [id(leaf) in itself for leaf in self.plain]

    def wrap_once(self, plain: Sequence[Any]) -> list[Any]:
        """The operands again, each once, around other plain ones."""
        leaves = iter([plain[n] for n in self._leaf_places])
        return [wrap_value(part, leaves) for part in self._parts]

    def wrap(self, plain: Sequence[Any]) -> list[Any]:
        """The operands again, as they were given, around other plain ones."""
        return self.repeat(self.wrap_once(plain))

    def repeat(self, once: Sequence[Any]) -> list[Any]:
        """All operands, from each of them once."""
        return [once[n] for n in self._places]


def _symbolic_sizes(values: Iterable[Any]) -> list[torch.SymInt]:
    """The symbols in the outer sizes of wrappers, which a function over plain tensors is given besides.

    A compiler asks that each symbol in the size of an operand (offsets of size ``B + 1``) is an operand or the size
    of one, which it is for the tensors that Dynamo gave the op.
    """
    sizes = [size for value in values if is_declared(value) for size in value.shape]
    return list({str(size): size for size in sizes if isinstance(size, torch.SymInt)}.values())


def without_repetition(values: Iterable[Any]) -> tuple[list[Any], list[int]]:
    """Each tensor once, and for every value its place among them; ints are not told apart from one another."""
    once: list[Any] = []
    first: dict[int, int] = {}
    places = []
    for value in values:
        place = first.setdefault(id(value), len(once)) if isinstance(value, Tensor) else len(once)
        if place == len(once):
            once.append(value)
        places.append(place)
    return once, places
