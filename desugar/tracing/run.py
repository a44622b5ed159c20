"""One run of the function on functional tensors: what it got, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from desugar import _torch as private
from desugar.ir.storage import storage_of
from desugar.ir.values import Plain, Value, Wrapper, slots_of

# ------------------------------------------------------------------------------------------------- records


@dataclass(frozen=True, slots=True)
class Entered:
    """An input leaf as the function got it.

    Attributes:
        value: What it is made of.
        root: The tensor that gradients are taken with respect to.
        leaf: What the function sees: the root, or a non-leaf around the same tensors.
        grad_fn, version: Of `leaf`, before the function ran.
    """

    value: Value
    root: Any
    leaf: Any
    grad_fn: Any = None
    version: int = 0


@dataclass(frozen=True, slots=True)
class Storages:
    """Which storages stand for the memory of an input: of the functional tensor, and of the object around it."""

    functional: int
    outer: int


@dataclass(slots=True)
class Run:
    """One run of the function on functional tensors.

    Attributes:
        items: Functional tensors and symbolic ints, by input slot.
        versions: Their version counters before the run.
        storages: The storages they lay in when the function got them.
        entered: The argument and captured leaves, in order of `Inputs.values`.
        homes: Slot -> slot of the storage that it is a view of, for inputs that overlap.
        result: What the function returned.
        tokens: The last token of each kind of effect that ops of the function have.
    """

    items: list[Any]
    versions: list[int]
    storages: list[Storages]
    entered: list[Entered]
    homes: dict[int, int]
    result: Any
    tokens: tuple[Any, ...] = ()

    @property
    def leaves(self) -> list[Any]:
        """What the function saw."""
        return [entered.leaf for entered in self.entered]


# --------------------------------------------------------------------------------------- functional tensors


def plain(tensor: Any) -> Any:
    """The tensor inside a functional one, with pending writes carried out; a symbolic int as it is."""
    if not isinstance(tensor, private.FunctionalTensor):
        return tensor
    private.sync_functional_tensor(tensor)
    return private.from_functional_tensor(tensor.elem)


def identity(item: Any) -> int:
    """Which functional tensor this is, whatever Python object stands around it."""
    return id(item.elem) if isinstance(item, private.FunctionalTensor) else id(item)


def storages_of(item: Any) -> Storages:
    """The storages of a functional tensor; a symbolic int has none."""
    if not isinstance(item, private.FunctionalTensor):
        return Storages(0, 0)
    return Storages(storage_of(item.elem), storage_of(item))


def has_other_storage(slot: int, run: Run) -> bool:
    """Whether an input was given another storage: not where it is its own, as in `module.to(dtype)` without effect."""
    elem = run.items[slot].elem
    if not private.was_storage_changed(elem):
        return False
    now = storages_of(run.items[slot]).functional
    return now != run.storages[slot].functional or bool(private.get_view_meta_sequence(elem))


def changed_slots(value: Value, items: Sequence[Any]) -> list[int]:
    """Slots of the tensors in an input leaf that were written to."""
    return [
        slot
        for slot in slots_of(value)
        if isinstance(items[slot], Tensor) and private.has_data_mutation(items[slot])
    ]


def assigned_inners(entered: Entered, items: Sequence[Any]) -> list[str]:
    """Names of the inner tensors of an input leaf that were replaced by another object."""
    if not isinstance(entered.value, Wrapper):
        return []
    return [
        name
        for name, part in entered.value.inner
        if isinstance(part, Plain) and identity(getattr(entered.leaf, name)) != identity(items[part.index])
    ]
