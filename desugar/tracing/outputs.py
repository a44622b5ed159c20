"""What a run of the function returned and what it wrote.

A result leaf is one of: the very object that came in; a view of an argument or of another result, which is taken
again at run time so that it is a real view of the real tensor; something that the graph computes. A written
argument gets its new value in one of two ways. Where autograd recorded the write, the new value is a hidden
result of the program and `copy_` puts it in place, which records it again. Otherwise the graph itself stores
it: functionalization has made every write a value, so one store at the end is all there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import SymInt, Tensor

from desugar import _torch as private
from desugar.errors import DesugarError
from desugar.ir.outputs import Outputs
from desugar.ir.pytree import flatten
from desugar.ir.storage import base_of, storage_of
from desugar.ir.values import (
    Flat,
    Int,
    Plain,
    Same,
    Value,
    View,
    Wrapper,
    renumber,
    slots_of,
    unwrap_value,
)
from desugar.tracing.functionalize import plain_parts
from desugar.tracing.run import Run, assigned_inners, changed_slots, identity, plain

# --------------------------------------------------------------------------------------------- taking apart


@dataclass(frozen=True, slots=True)
class Result:
    """The live result of one run: its leaves, hidden ones included, and the tensors and ints inside by slot."""

    leaves: list[Any]
    items: list[Any]


def take_apart(run: Run) -> tuple[Outputs, Result]:
    """The result's structure and plain tensors; and its live leaves.

    Raises:
        DesugarError: Two results share memory in a way that cannot be repeated.
    """
    leaves, treespec = flatten(run.result)
    return _Taker(run, leaves).take(treespec)


@dataclass(slots=True)
class _Taker:
    """Takes one result apart."""

    run: Run
    leaves: list[Any]
    flat: Flat = field(default_factory=Flat)
    values: list[Value] = field(default_factory=list)
    fresh: set[int] = field(default_factory=set)

    def take(self, treespec: optree.PyTreeSpec) -> tuple[Outputs, Result]:
        visible = list(self.leaves)
        anchors = self._anchors(visible)
        hidden = {id(base): base for base in anchors.values() if not any(base is leaf for leaf in visible)}
        self.leaves = [*visible, *hidden.values()]
        places = {id(leaf): n for n, leaf in reversed([*enumerate(self.leaves)]) if isinstance(leaf, Tensor)}
        for number, leaf in enumerate(self.leaves):
            self.values.append(self._value(number, leaf, places, anchors))
        assigns = self._take_assigns()
        writes, stores = self._take_writes()
        tokens = tuple(self.flat.tensor(token) for token in self.run.tokens)
        outputs = Outputs(
            treespec,
            tuple(self.values),
            tuple(plain(item) for item in self.flat.items),
            self._same_as_inputs(),
            writes,
            stores,
            self._version_rises(),
            self.run.homes,
            assigns,
            tokens,
        )
        return outputs, Result(self.leaves, self.flat.items)

    def _value(self, number: int, leaf: Any, places: dict[int, int], anchors: dict[int, Tensor]) -> Value:
        if not isinstance(leaf, Tensor):
            return unwrap_value(leaf, self.flat)
        for n, entered in enumerate(self.run.entered):
            if leaf is entered.leaf:
                return Same("input", n)
        if places[id(leaf)] != number:
            return Same("output", places[id(leaf)])
        source = self._input_of(leaf)
        if source is not None:
            return self._view("input", source, leaf, self.run.entered[source].leaf)
        anchor = anchors.get(storage_of(leaf))
        if anchor is None or anchor is leaf:
            return unwrap_value(leaf, self.flat)
        return self._view("output", places[id(anchor)], leaf, anchor)

    def _same_as_inputs(self) -> dict[int, int]:
        slots = {identity(item): n for n, item in enumerate(self.run.items) if isinstance(item, Tensor)}
        symbols: dict[Any, int] = {}
        for slot, item in enumerate(self.run.items):
            if isinstance(item, SymInt):
                symbols.setdefault(item.node.expr, slot)
        same: dict[int, int] = {}
        for slot, item in enumerate(self.flat.items):
            key = symbols.get(item.node.expr) if isinstance(item, SymInt) else slots.get(identity(item))
            if key is not None and slot not in self.fresh:
                same[slot] = key
        return same

    # .............................................................................................. views

    def _input_of(self, leaf: Tensor) -> int | None:
        """The input leaf whose memory a result shares."""
        storage, base = storage_of(leaf), base_of(leaf)
        sharing = [
            n
            for n, e in enumerate(self.run.entered)
            if isinstance(e.leaf, Tensor) and storage_of(e.leaf) == storage
        ]
        return next((n for n in sharing if self.run.entered[n].leaf is base), sharing[0] if sharing else None)

    def _anchors(self, leaves: Sequence[Any]) -> dict[int, Tensor]:
        """Memory that several results share, and no input -> the tensor they are views of."""
        groups: dict[int, list[Tensor]] = {}
        for leaf in {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values():
            if self._input_of(leaf) is None:
                groups.setdefault(storage_of(leaf), []).append(leaf)
        anchors: dict[int, Tensor] = {}
        for storage, group in groups.items():
            if len(group) > 1:
                bases = [base_of(leaf) for leaf in group]
                anchors[storage] = next((base for base in bases if base.requires_grad), bases[0])
        return anchors

    def _view(self, of: str, index: int, leaf: Tensor, base: Any) -> View:
        """How to take a view again; `base` stands for argument or result `index`."""
        direct = base_of(leaf)
        detached = direct is not base
        dtype = direct.dtype if direct.dtype != base.dtype else None  # `x.view(dtype)` is no view to autograd
        if detached and (direct.requires_grad or _extents(direct) != _extents(_retyped(base, dtype))):
            raise DesugarError(
                f"a result of size {tuple(leaf.shape)} shares memory with {of} {index} without being a view of it",
                instead="return a clone()",
            )
        no_grad = direct.requires_grad and leaf.grad_fn is None
        if not leaf._is_view():
            replay = _as_it_is if dtype is None else _Replay(leaf, dtype)
            return View(of, index, replay, (), detached, no_grad)
        ints: list[Int] = []

        def note(extent: Any) -> Any:
            ints.append(self.flat.integer(extent))
            return extent

        with private.DisableTorchFunctionSubclass():
            leaf._view_func_unsafe(direct, note)
        return View(of, index, _Replay(leaf, dtype), tuple(ints), detached, no_grad)

    # ............................................................................................... writes

    def _take_writes(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        writes: list[tuple[int, int]] = []
        stores: dict[int, int] = {}
        recorded: set[int] = set()
        for number, entered in enumerate(self.run.entered):
            changed = changed_slots(entered.value, self.run.items)
            if changed and entered.leaf.grad_fn is not entered.grad_fn:
                writes.append((number, len(self.values)))
                self.values.append(self._new_value(entered.leaf))
                self.leaves.append(entered.leaf)
                recorded.update(changed)
        for entered in self.run.entered:
            for slot in changed_slots(entered.value, self.run.items):
                home = self.run.homes.get(slot, slot)
                if slot not in recorded and home not in stores:
                    stores[home] = self._again(self.run.items[home])
        return tuple(writes), tuple(stores.items())

    def _take_assigns(self) -> tuple[tuple[int, str, int], ...]:
        assigns: list[tuple[int, str, int]] = []
        for number, entered in enumerate(self.run.entered):
            for name in assigned_inners(entered, self.run.items):
                assigns.append((number, name, len(self.values)))
                self.leaves.append(getattr(entered.leaf, name))
                self.values.append(unwrap_value(self.leaves[-1], self.flat))
        return tuple(assigns)

    def _again(self, item: Any) -> int:
        """A slot of its own for the new value of an input's tensor."""
        slot = self.flat.duplicate(item)
        self.fresh.add(slot)
        return slot

    def _new_value(self, leaf: Any) -> Value:
        """The value of a written input: its tensors are results, whatever they were before."""
        found = Flat()
        value = unwrap_value(leaf, found)
        slots = [
            self._again(item) if isinstance(item, Tensor) else self.flat.integer(item).index  # type: ignore[union-attr]
            for item in found.items
        ]
        return renumber(value, slots)

    def _version_rises(self) -> tuple[tuple[int, tuple[str, ...], int], ...]:
        rises: list[tuple[int, tuple[str, ...], int]] = []
        counted: set[int] = set()  # a tensor in several places has one counter
        for number, entered in enumerate(self.run.entered):
            if not isinstance(entered.value, Plain | Wrapper):
                continue  # the same object again, or no tensor
            rise = entered.leaf._version - entered.version
            changed = changed_slots(entered.value, self.run.items)
            if changed or rise:  # a write that changes nothing is one, too
                if not isinstance(entered.value, Plain) or entered.value.index not in counted:
                    rises.append((number, (), rise))
                counted.update(slots_of(entered.value) if isinstance(entered.value, Plain) else ())
                if isinstance(entered.value, Wrapper):
                    for name, part in entered.value.inner:
                        if isinstance(part, Plain) and part.index not in counted:
                            counted.add(part.index)
                            rise = self.run.items[part.index]._version - self.run.versions[part.index]
                            rises.append((number, (name,), rise))
        return tuple(rises)


# ---------------------------------------------------------------------------------------------------- views


def _extents(tensor: Tensor) -> tuple[Any, ...]:
    """Size and stride, and where each plain tensor inside begins."""
    offsets = tuple(part.storage_offset() for part in plain_parts(tensor))
    return tuple(tensor.size()), tuple(tensor.stride()), offsets


def _as_it_is(base: Any, ints: Sequence[int]) -> Any:
    return base


def _retyped(base: Any, dtype: torch.dtype | None) -> Any:
    return base if dtype is None else base.detach().view(dtype)


class _Replay:
    """Takes the view that a traced tensor is, of another base; of its bits as another dtype, if one is given."""

    __slots__ = ("dtype", "traced")

    def __init__(self, traced: Tensor, dtype: torch.dtype | None) -> None:
        self.traced, self.dtype = traced, dtype

    def __call__(self, base: Any, ints: Sequence[int]) -> Any:
        following = iter(ints)
        base = _retyped(base, self.dtype)
        if not self.traced._is_view():
            return base
        with private.DisableTorchFunctionSubclass():
            view = self.traced._view_func_unsafe(base, lambda extent: next(following))
        if hasattr(base, "took_view"):  # what a class does for views above autograd
            base.took_view(view)
        return view
