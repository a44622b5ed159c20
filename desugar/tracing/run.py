"""The record of one run of the function on functional tensors, and queries on functional tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from desugar import _torch as torch_private
from desugar.ir.values import Plain, Value, Wrapper, slots_of
from subclasses._torch import storage_key

# ------------------------------------------------------------------------------------------------- records


@dataclass(frozen=True, slots=True)
class InputLeaf:
    """A leaf of the inputs in one run.

    Attributes:
        value: The structure of the leaf.
        root: The tensor with respect to which gradients are computed.
        argument: The object that the function receives: `root`, or a non-leaf of autograd over the same tensors.
        grad_fn, version: `grad_fn` and version counter of `argument` before the function runs.
    """

    value: Value
    root: Any
    argument: Any
    grad_fn: Any = None
    version: int = 0


@dataclass(frozen=True, slots=True)
class Storages:
    """The storages that represent the memory of an input in a trace.

    Attributes:
        functional: The storage of the C++ functional tensor.
        python_storage: The storage of the Python `FunctionalTensor` around it.
    """

    functional: int
    python_storage: int


class Detached(NamedTuple):
    """A result of `detach()`, and the tensor that was detached."""

    result: Tensor
    source: Tensor


@dataclass(slots=True)
class Run:
    """One run of the function on functional tensors.

    Attributes:
        items: Functional tensors and symbolic ints, by input slot.
        versions: The version counters of `items` before the run, by input slot; 0 for captured tensors.
        storages: The storages of `items` when the function receives them, by input slot.
        input_leaves: The argument and captured leaves, in order of `Inputs.values`.
        result: The function's result.
        tokens: The last token of each kind of effect of the function's ops.
        detached: Id of a result of `detach()` -> that result and the tensor that was detached.
    """

    items: list[Any]
    versions: list[int]
    storages: list[Storages]
    input_leaves: list[InputLeaf]
    result: Any
    tokens: tuple[Any, ...] = ()
    detached: dict[int, Detached] = field(default_factory=dict)

    @property
    def leaves(self) -> list[Any]:
        """The objects that the function received."""
        return [input_leaf.argument for input_leaf in self.input_leaves]


# --------------------------------------------------------------------------------------- functional tensors


def from_functional(tensor: Any) -> Any:
    """Returns the tensor inside a functional tensor, after its pending writes; returns a symbolic int unchanged."""
    if not isinstance(tensor, torch_private.FunctionalTensor):
        return tensor
    torch_private.sync_functional_tensor(tensor)
    return torch_private.from_functional_tensor(tensor.elem)


def identity(item: Any) -> int:
    """Returns an id of the C++ functional tensor, the same for each Python object around it."""
    return id(item.elem) if isinstance(item, torch_private.FunctionalTensor) else id(item)


def storages_of(item: Any) -> Storages:
    """Returns the storages of a functional tensor; returns zeros for a symbolic int."""
    if not isinstance(item, torch_private.FunctionalTensor):
        return Storages(0, 0)
    return Storages(storage_key(item.elem), storage_key(item))


def has_other_storage(slot: int, run: Run) -> bool:
    """Whether the function has given an input another storage.

    False for an assignment of the input's own storage, as by a `module.to(dtype)` that changes nothing.
    """
    item = run.items[slot]
    return torch_private.was_storage_changed(item.elem) and (
        storages_of(item).functional != run.storages[slot].functional
        or bool(torch_private.get_view_meta_sequence(item.elem))
    )


def changed_slots(value: Value, items: Sequence[Any]) -> list[int]:
    """Returns the input slots of the tensors in an input leaf that the function wrote to."""
    return [
        slot
        for slot in slots_of(value)
        if isinstance(items[slot], Tensor) and torch_private.has_data_mutation(items[slot])
    ]


def assigned_inners(input_leaf: InputLeaf, items: Sequence[Any]) -> list[str]:
    """Returns the names of the inner tensors of an input leaf that the function replaced by other tensors."""
    if not isinstance(input_leaf.value, Wrapper):
        return []
    return [
        name
        for name, part in input_leaf.value.inner
        if isinstance(part, Plain)
        and identity(getattr(input_leaf.argument, name)) != identity(items[part.index])
    ]
