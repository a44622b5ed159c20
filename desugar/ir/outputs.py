"""Records of a function's results and of its mutations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from desugar.ir.values import Value, View, slots_of


@dataclass(frozen=True, slots=True)
class Outputs:
    """The results and the mutations of a function.

    Attributes:
        num_visible: The number of result leaves.
        values: One value per result leaf, then one per hidden result: bases of views, new values of mutated inputs,
            replaced inner tensors.
        items: Fake tensors and symbolic ints, by output slot.
        inputs: Output slot -> input slot, for each output that is an input itself.
        writes: (input leaf, index in `values`) of each mutated input whose write autograd recorded. The wrapper copies
            the value into the input after the call.
        stores: (input slot, output slot) of each other mutated input tensor. The graph stores the output in it.
        held: (output slot, input slot) of each computed inner tensor in the memory of an input in `stores`.
        versions: (input leaf, attribute path, increase of the version counter) of each mutated tensor.
        assigns: (input leaf, name, index in `values`) of each inner tensor that the function replaced.
        tokens: Output slots of the last effect tokens.
    """

    num_visible: int
    values: tuple[Value, ...]
    items: tuple[Any, ...]
    inputs: Mapping[int, int]
    writes: tuple[tuple[int, int], ...] = ()
    stores: tuple[tuple[int, int], ...] = ()
    versions: tuple[tuple[int, tuple[str, ...], int], ...] = ()
    assigns: tuple[tuple[int, str, int], ...] = ()
    tokens: tuple[int, ...] = ()
    held: tuple[tuple[int, int], ...] = ()

    @property
    def returned(self) -> list[int]:
        """The output slots that the graph computes, in order of its outputs."""
        return [slot for slot in range(len(self.items)) if slot not in self.inputs]

    @property
    def visible(self) -> tuple[Value, ...]:
        """The values of the result leaves, without the hidden results."""
        return self.values[: self.num_visible]

    @property
    def has_effects(self) -> bool:
        """Whether the function mutates its inputs or assigns to their inner tensors."""
        return bool(self.versions or self.assigns)

    def with_views_of(self, earlier: Outputs) -> Outputs:
        """Returns a copy with the :class:`View` values of an earlier run of the same function."""
        pairs = zip(self.values, earlier.values, strict=True)
        return replace(self, values=tuple(old if isinstance(old, View) else new for new, old in pairs))


def store_positions(outputs: Outputs) -> dict[int, int]:
    """Returns a map from input slot to the index of the graph output that the graph stores in it."""
    positions = {slot: n for n, slot in enumerate(outputs.returned)}
    return {slot: positions[value] for slot, value in outputs.stores}


def held_positions(outputs: Outputs) -> dict[int, int]:
    """Returns a map from the index of a graph output to the input slot whose memory holds it."""
    positions = {slot: n for n, slot in enumerate(outputs.returned)}
    return {positions[slot]: home for slot, home in outputs.held}


def token_positions(outputs: Outputs) -> list[int]:
    """Returns the indices of the graph outputs that are effect tokens."""
    return [n for n, slot in enumerate(outputs.returned) if slot in outputs.tokens]


def unread_positions(outputs: Outputs) -> set[int]:
    """Returns the indices of the graph outputs that the wrapper does not read: stored outputs and effect tokens."""
    return {*store_positions(outputs).values(), *token_positions(outputs)}


def written_slots(values: Sequence[Value], outputs: Outputs) -> set[int]:
    """Returns the input slots whose memory the program changes, in the graph or after it."""
    slots = {slot for slot, _ in outputs.stores}
    for leaf, _ in outputs.writes:
        slots.update(slots_of(values[leaf]))
    return slots
