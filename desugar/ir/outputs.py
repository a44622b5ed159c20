"""What a function returned and what it wrote, as records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import optree

from desugar.ir.values import Value, View, slots_of


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a function returned and wrote.

    Attributes:
        treespec: optree's structure of the result.
        values: One per leaf, then the hidden ones: bases of views, new values of written inputs.
        items: Fake tensors and symbolic ints, by output slot.
        inputs: Slot of `items` -> slot of the inputs, for those that are an input itself.
        writes: (input leaf, result) of the inputs whose write autograd recorded.
        stores: (input slot, output slot) of the other writes.
        versions: (input leaf, attribute path) -> by how much its version counter rises.
        homes: Input slot -> slot of the storage that it is a view of.
        assigns: (input leaf, name, result) of inner tensors that were replaced.
        tokens: Output slots of the last tokens of effects.
    """

    treespec: optree.PyTreeSpec
    values: tuple[Value, ...]
    items: tuple[Any, ...]
    inputs: Mapping[int, int]
    writes: tuple[tuple[int, int], ...] = ()
    stores: tuple[tuple[int, int], ...] = ()
    versions: tuple[tuple[int, tuple[str, ...], int], ...] = ()
    homes: Mapping[int, int] = field(default_factory=dict)
    assigns: tuple[tuple[int, str, int], ...] = ()
    tokens: tuple[int, ...] = ()

    @property
    def returned(self) -> list[int]:
        """Slots that the graph computes, in order of its outputs."""
        return [slot for slot in range(len(self.items)) if slot not in self.inputs]

    @property
    def visible(self) -> tuple[Value, ...]:
        """The values of the result's own leaves."""
        return self.values[: self.treespec.num_leaves]

    @property
    def has_effects(self) -> bool:
        """Whether the function changes its inputs."""
        return bool(self.versions or self.assigns)

    def with_views_of(self, earlier: Outputs) -> Outputs:
        """The same, with the views that an earlier run of the same function took."""
        pairs = zip(self.values, earlier.values, strict=True)
        return replace(self, values=tuple(old if isinstance(old, View) else new for new, old in pairs))


def store_positions(outputs: Outputs) -> dict[int, int]:
    """Input slot -> output of the graph that is stored in it."""
    positions = {slot: n for n, slot in enumerate(outputs.returned)}
    return {slot: positions[value] for slot, value in outputs.stores}


def token_positions(outputs: Outputs) -> list[int]:
    """Outputs of the graph that are tokens of effects."""
    return [n for n, slot in enumerate(outputs.returned) if slot in outputs.tokens]


def unread_positions(outputs: Outputs) -> set[int]:
    """Outputs of the graph that nobody reads: they are stored, or end an effect."""
    return {*store_positions(outputs).values(), *token_positions(outputs)}


def written_slots(values: Sequence[Value], outputs: Outputs) -> set[int]:
    """Input slots whose memory the program changes, in the graph or after it."""
    slots = {slot for slot, _ in outputs.stores}
    for leaf, _ in outputs.writes:
        slots.update(slots_of(values[leaf]))
    return slots | {outputs.homes[slot] for slot in slots if slot in outputs.homes}
