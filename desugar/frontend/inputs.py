"""The inputs of a program: arguments and captured tensors, taken apart into plain tensors and symbolic ints.

This is the step that comes before everything else. Arguments that are tensor subclasses are replaced by the
plain tensors inside them; a plain tensor that occurs twice, in whatever wrappers, becomes one input. A tensor
that the function reaches by another way than its arguments (a parameter, a closure cell, a global) is
*captured*: it becomes an input held by reference the moment the function touches it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import SymInt, Tensor, nn

from desugar import _torch as private
from desugar.errors import DesugarError
from desugar.frontend.fakes import Fakes, check_class, check_nested, is_symbolic, symbolic_context
from desugar.ir.storage import whole_storage
from desugar.ir.values import (
    Constant,
    Flat,
    Int,
    Plain,
    Same,
    Slot,
    Value,
    Wrapper,
    inner_names,
    is_wrapper,
    requires_grad,
    slots_of,
    unwrap_value,
    wrap_value,
)
from subclasses import TensorSubclass

# -------------------------------------------------------------------------------------------------- inputs


class StaticNeeded(Exception):
    """The call has to be traced with constant sizes: a zero gradient or memory that is shared would have them."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a flat input comes from at run time: an attribute path of a leaf, or `text` over the leaves' names."""

    leaf: int
    path: tuple[str, ...]
    text: str | None = None

    @property
    def name(self) -> str:
        """The attribute path as text, over the names that a program gives its arguments (`a0.values`)."""
        return ".".join([f"a{self.leaf}", *self.path])

    def field(self, name: str) -> Origin:
        """An attribute of what is there."""
        return Origin(self.leaf, (*self.path, name))

    def find(self, leaves: Sequence[Any]) -> Any:
        """The object itself, among argument leaves."""
        return functools.reduce(getattr, self.path, leaves[self.leaf])


@dataclass(slots=True)
class Inputs:
    """All inputs of one program.

    Attributes:
        fakes: The fake mode, the symbols and the guards.
        is_dynamic: Sizes and dynamic ints of the arguments are symbols.
        values: One value per leaf: argument leaves first, then captured tensors.
        captured: The captured tensors themselves, in the order of their values.
        flat: Real plain tensors and symbolic ints, by slot.
        fake_items: Fake tensors and symbolic ints, by slot.
        origins: Where each slot comes from at run time.
        num_arguments: How many of `values` are argument leaves.
        bases: Slot of a whole storage -> slots of the tensors in it that overlap while one is written.
        are_apart: Inputs that share memory are traced as if they did not; the wrapper looks at each call.
        is_sealed: The first run is over: whatever comes from outside is known.
        first_leaf: Id of each tensor among the arguments -> number of the leaf where it occurs first.
        parameters: Numbers of the argument leaves that are an `nn.Parameter`.
        generators, made: What the runs drew random numbers from; what torch functions gave in them.
    """

    fakes: Fakes
    is_dynamic: bool = False
    values: list[Value] = field(default_factory=list)
    captured: list[Tensor] = field(default_factory=list)
    flat: Flat = field(default_factory=Flat)
    fake_items: dict[int, Any] = field(default_factory=dict)
    origins: dict[int, Origin] = field(default_factory=dict)
    num_arguments: int = 0
    bases: dict[int, tuple[int, ...]] = field(default_factory=dict)
    are_apart: bool = False
    first_leaf: dict[int, int] = field(default_factory=dict)
    is_sealed: bool = False
    parameters: set[int] = field(default_factory=set)
    generators: list[torch.Generator] = field(default_factory=list)
    made: list[weakref.ref[Tensor]] = field(default_factory=list)

    def add_arguments(self, leaves: list[object]) -> None:
        """Takes the argument leaves apart, and gives every symbol a slot of its own.

        The compiled graphs read sizes from their arguments: a symbol without a placeholder would be unbound.
        """
        first = self.first_leaf
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, nn.Parameter):
                self.parameters.add(number)
            if isinstance(leaf, Tensor) and first.setdefault(id(leaf), number) != number:
                self.values.append(Same("input", first[id(leaf)]))
            else:
                self._add(leaf, dynamic=self.is_dynamic)
        for symbol in self.fakes.symbols.values():
            self._integer(symbol.value, symbol.text)
        self.num_arguments = len(self.values)

    def add_captured(self, tensor: Tensor) -> Value:
        """Makes a tensor from outside an input, held by reference and with constant sizes.

        Raises:
            DesugarError: The first run did not meet it, so it is made anew in each.
        """
        if self.is_sealed:
            raise DesugarError(
                f"a {type(tensor).__name__} of size {tuple(tensor.shape)} is made inside the function in a way "
                "that torch does not see (torch.from_numpy, torch.frombuffer, torch.Tensor(...), a class's own code)",
                instead="make it outside the function, or with torch.tensor(...)",
            )
        self.captured.append(tensor)
        if id(tensor) in self.first_leaf:  # it is an argument too
            self.values.append(Same("input", self.first_leaf[id(tensor)]))
            return self.values[-1]
        return self._add(tensor, dynamic=False)

    def note_generator(self, generator: torch.Generator) -> None:
        """Takes a generator of random numbers as a constant.

        Raises:
            DesugarError: The function makes it anew in each run.
        """
        if any(generator is known for known in self.generators):
            return
        if self.is_sealed:
            raise DesugarError(
                "a torch.Generator is made inside the function; a program would go on with that of the trace",
                instead="make it outside the function",
                stock_is_wrong=True,
            )
        self.generators.append(generator)

    def add_faked(self, leaves: list[Any], fake_leaves: list[Any], names: Sequence[str]) -> None:
        """Takes the argument leaves apart by fakes that Dynamo made, whose guards cover them.

        What two arguments hold may be one tensor in one call and two in the next, so each occurrence is an input. But
        what Dynamo read of an argument, as `x.values`, is that inner tensor in every call.

        Args:
            leaves: The arguments.
            fake_leaves: Their fakes.
            names: How Dynamo names them.
        """
        self.are_apart = True
        values: dict[int, Value] = {}
        for number in sorted(range(len(leaves)), key=lambda n: not is_wrapper(leaves[n])):
            if isinstance(leaves[number], nn.Parameter):
                self.parameters.add(number)
            inside = self._find_inside(number, names)
            plain = None if inside is None or is_wrapper(leaves[number]) else self._slot_at(inside)
            if plain is None:
                values[number] = self._add_fake(leaves[number], fake_leaves[number], number, ())
            else:
                values[number] = Plain(plain, leaves[number].requires_grad, leaves[number].is_leaf)
        self.values += [values[number] for number in range(len(leaves))]
        self.num_arguments = len(self.values)

    def _find_inside(self, number: int, names: Sequence[str]) -> Origin | None:
        """The place of an argument inside of another one, by their names."""
        parts = names[number].split(".") if number < len(names) else []
        for length in range(len(parts) - 1, 0, -1):
            owner = ".".join(parts[:length])
            if owner in names:
                return Origin(names.index(owner), tuple(parts[length:]))
        return None

    def _slot_at(self, place: Origin) -> int | None:
        return next((slot for slot, origin in self.origins.items() if origin == place), None)

    def _add_fake(self, leaf: Any, fake: Any, number: int, path: tuple[str, ...]) -> Value:
        if isinstance(fake, SymInt) and fake.node.expr.is_number:  # a symbol that turned out to be one number
            return Constant(int(fake))
        if isinstance(fake, SymInt):
            place = self._integer(fake, f"a{number}")
            return Constant(None, place.index) if isinstance(place, Slot) else Constant(place)
        if not isinstance(fake, Tensor):
            return Constant(fake)
        check_nested(leaf)
        value = unwrap_value(fake, Flat())
        name = ".".join([f"a{number}", *path])
        if isinstance(value, Plain):
            check_class(leaf)
            slot = (
                self.flat.tensor(leaf) if id(leaf) not in self.flat.tensor_ids else self.flat.duplicate(leaf)
            )
            self.fake_items[slot] = fake.detach() if slot != self.flat.tensor(leaf) else fake
            self.origins[slot] = Origin(number, path)
            self._note_extents(fake, name)
            return Plain(slot, leaf.requires_grad and not path, leaf.is_leaf)
        assert isinstance(value, Wrapper)
        if type(fake) is not type(leaf):
            raise DesugarError(
                f"{type(leaf).__name__}.__tensor_unflatten__ gives a {type(fake).__name__}",
                instead=f"define it in {type(leaf).__name__}, and return one of that class",
            )
        inner = tuple(
            (field, self._add_fake(getattr(leaf, field), getattr(fake, field), number, (*path, field)))
            for field, _ in value.inner
        )
        dynamics = tuple(
            (field, self._integer(getattr(fake, field), f"{name}.{field}")) for field, _ in value.dynamics
        )
        size, stride = self._note_extents(fake, name)
        return replace(
            value,
            inner=inner,
            dynamics=dynamics,
            size=size,
            stride=stride,
            requires_grad=leaf.requires_grad,
            is_leaf=leaf.is_leaf,
        )

    def _note_extents(self, fake: Tensor, name: str) -> tuple[tuple[Int, ...], tuple[Int, ...]]:
        size = tuple(self._integer(extent, f"{name}.size({dim})") for dim, extent in enumerate(fake.size()))
        stride = tuple(
            self._integer(extent, f"{name}.stride({dim})") for dim, extent in enumerate(fake.stride())
        )
        return size, stride

    def add_base(self, slots: tuple[int, ...]) -> None:
        """Makes the storage that tensors overlap in an input, of which they are views from now on.

        Raises:
            DesugarError: They have several dtypes, or one requires grad.
            StaticNeeded: Their sizes are symbolic.
        """
        reals, fakes = ([items[slot] for slot in slots] for items in (self.flat.items, self.fake_items))
        grads = any(requires_grad(v) and not {*slots_of(v)}.isdisjoint(slots) for v in self.values)
        if grads or len({real.dtype for real in reals}) > 1:
            sizes = [tuple(real.shape) for real in reals]
            raise DesugarError(
                f"tensors of sizes {sizes} share memory, and one of them is changed in place",
                instead="pass one of them, or clones",
                stock_is_wrong=True,
            )
        if any(map(is_symbolic, fakes)):
            raise StaticNeeded
        base = self.flat.duplicate(whole_storage(reals[0]))
        self.fake_items[base] = self.fakes.tensor(self.flat.items[base], f"storage{base}")
        self.origins[base] = Origin(-1, ())
        self.bases[base] = slots

    @property
    def homes(self) -> dict[int, int]:
        """Slot -> slot of the storage that it is a view of."""
        return {slot: base for base, slots in self.bases.items() for slot in slots}

    @property
    def has_symbols(self) -> bool:
        """Whether some size or int is a symbol."""
        return any(origin.text is not None for origin in self.origins.values())

    def primals(self) -> list[Any]:
        """Fake tensors and symbolic ints in slot order: what the traced graph takes."""
        return [self.fake_items[slot] for slot in range(len(self.flat.items))]

    def release_arguments(self) -> None:
        """Forgets the real tensors of the call, which the program would otherwise keep alive."""
        self.flat.release()

    def rebuild(self, value: Value, items: list[Any]) -> Any:
        """The leaf of `value` from plain tensors (fake or functional), with its `requires_grad`."""
        leaf = wrap_value(value, items)
        if isinstance(value, Plain | Wrapper) and value.requires_grad:
            leaf.requires_grad_()
        return leaf

    # .................................................................................. taking a leaf apart

    def _add(self, leaf: object, *, dynamic: bool) -> Value:
        number = len(self.values)
        check_nested(leaf)
        value = unwrap_value(leaf, self.flat)
        if isinstance(leaf, Tensor):
            value = self._fakeify(value, leaf, Origin(number, ()), dynamic)
        self.values.append(value)
        return value

    def _fakeify(self, value: Value, real: Any, origin: Origin, dynamic: bool) -> Value:
        """Makes the fakes of a tensor value, and symbols for its dynamic ints and outer sizes."""
        if isinstance(value, Plain):
            if value.index not in self.fake_items:
                self.fake_items[value.index] = self.fakes.tensor(real, origin.name, is_dynamic=dynamic)
                self.fakes.real_of[origin.name] = origin
                self.origins[value.index] = origin
            return value
        assert isinstance(value, Wrapper)
        inner = tuple(
            (name, self._fakeify(part, getattr(real, name), origin.field(name), dynamic))
            for name, part in value.inner
        )
        dynamics = tuple(
            (name, self._dynamic_int(getattr(real, name), origin.field(name), dynamic))
            for name, _ in value.dynamics
        )
        size, stride = self._outer_extents(value, real, origin, dynamic)
        return replace(value, inner=inner, dynamics=dynamics, size=size, stride=stride)

    def _dynamic_int(self, number: int, origin: Origin, dynamic: bool) -> Int:
        if not dynamic:
            return number
        symbol = self.fakes.integer(number, origin.name)
        self.fakes.real_of[origin.name] = origin
        return self._integer(symbol, origin.name) if isinstance(symbol, SymInt) else symbol

    def _outer_extents(
        self, value: Wrapper, real: Tensor, origin: Origin, dynamic: bool
    ) -> tuple[tuple[Int, ...], tuple[Int, ...]]:
        """Outer size and stride; symbols of their own for a class written by hand.

        A declared class computes its outer size from its inner tensors, so it needs none.
        """
        if not dynamic or real.dim() == 0 or issubclass(value.cls, TensorSubclass):
            return value.size, value.stride
        sizes, strides, _ = self.fakes.env.create_symbolic_sizes_strides_storage_offset(
            real, private.LocalSource(origin.name), symbolic_context=symbolic_context(real.dim(), dynamic)
        )
        with self.fakes.mode:
            stand_in = torch.empty_strided(sizes, strides, dtype=real.dtype, device=real.device)
        self.fakes.guarded.append((origin.name, stand_in))
        self.fakes.real_of[origin.name] = origin
        size = tuple(self._integer(s, f"{origin.name}.size({d})") for d, s in enumerate(sizes))
        return size, tuple(self._integer(s, f"{origin.name}.stride({d})") for d, s in enumerate(strides))

    def _integer(self, extent: Any, text: str) -> Int:
        """A constant, the slot of a symbol, or a derived int as it is (a stride that sizes determine)."""
        if isinstance(extent, SymInt) and not extent.node.expr.is_symbol:
            return extent  # type: ignore[return-value]
        place = self.flat.integer(extent)
        if isinstance(place, Slot) and place.index not in self.fake_items:
            self.fake_items[place.index] = self.fakes.canonical(extent)
            self.origins[place.index] = Origin(-1, (), text)
        return place


def is_traced(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a trace (fake or functional at the bottom) rather than to the world."""
    if isinstance(tensor, (private.FunctionalTensor, private.FakeTensor)):
        return True
    if private.is_functional_tensor(tensor) or private.is_functorch_wrapped_tensor(tensor):
        return True
    if not is_wrapper(tensor):
        return False
    return any(is_traced(getattr(tensor, name)) for name in inner_names(tensor)[0])
