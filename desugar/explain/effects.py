"""Aliasing and mutation as sentences, and what is saved for the backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from desugar.explain.leaves import extent_text
from desugar.explain.records import Saved
from desugar.frontend.fakes import hint
from desugar.frontend.inputs import Inputs
from desugar.ir.outputs import Outputs
from desugar.ir.stages import FromForward, FromInput
from desugar.ir.values import Same, Value, View, inner_names, is_wrapper, paths_of

NameLeaf = Callable[[str, int], str]

# ---------------------------------------------------------------------------------------------------- aliasing


def describe_shared(leaves: Sequence[Any], leaf_name: NameLeaf) -> Iterator[str]:
    """Which inner tensors of the arguments are one tensor in the call that was compiled."""
    places: dict[int, list[str]] = {}
    waiting = [(leaf_name("input", number), leaf) for number, leaf in enumerate(leaves)]
    for name, leaf in waiting:  # which grows
        if is_wrapper(leaf):
            waiting += [(f"{name}.{field}", getattr(leaf, field)) for field in inner_names(leaf)[0]]
        elif isinstance(leaf, Tensor):
            places.setdefault(id(leaf), []).append(name)
    for names in places.values():
        if len(names) > 1:
            yield f"{' and '.join(names)} are one tensor in this call"


def describe_aliasing(inputs: Inputs, outputs: Outputs, leaf_name: NameLeaf) -> Iterator[str]:
    """Which tensors share memory: among the inputs, and between inputs and results."""
    places: dict[int, list[str]] = {}
    for number, value in enumerate(inputs.values):
        if isinstance(value, Same):
            yield f"{leaf_name('input', number)} is the same object as {leaf_name('input', value.index)}"
        for slot, path in paths_of(value):
            places.setdefault(slot, []).append(".".join([leaf_name("input", number), *path]))
    for names in places.values():
        if len(names) > 1:
            yield f"{' and '.join(names)} are one tensor: one input of the graph"
    for slots in inputs.bases.values():
        names = " and ".join(places[slot][0] for slot in slots)
        yield f"{names} overlap in one storage, which is written to: the storage is an input, they are views of it"
    for number, value in enumerate(outputs.visible):
        yield from _aliases_of_result(leaf_name("output", number), value, outputs, places, leaf_name)


def _aliases_of_result(
    name: str, value: Value, outputs: Outputs, places: dict[int, list[str]], leaf_name: NameLeaf
) -> Iterator[str]:
    match value:
        case Same(of, index):
            yield f"{name} is the very object {leaf_name(of, index)}"
        case View(of, index):
            yield f"{name} is a view of {leaf_name(of, index)}"
        case _:
            for slot, path in paths_of(value):
                if slot in outputs.inputs:
                    inside = ".".join([name, *path])
                    yield f"{inside} is the tensor {places.get(outputs.inputs[slot], ['of an input'])[0]}"


def describe_mutation(inputs: Inputs, outputs: Outputs, leaf_name: NameLeaf) -> Iterator[str]:
    """What the function changes, and how the program does it."""
    places = {
        slot: ".".join([leaf_name("input", number), *path])
        for number, value in reversed(list(enumerate(inputs.values)))
        for slot, path in paths_of(value)
    }
    for leaf, _ in outputs.writes:
        yield f"{leaf_name('input', leaf)} is written to; copy_ after the graph, so that autograd records it"
    for slot, _ in outputs.stores:
        yield f"{places.get(slot, f'input {slot}')} is written to; the graph stores its new value"
    for leaf, name, _ in outputs.assigns:
        yield f"{leaf_name('input', leaf)}.{name} is replaced by another tensor"
    for leaf, path, rise in outputs.versions:
        where = ".".join([leaf_name("input", leaf), *path])
        yield f"the version counter of {where} rises by {rise}, as in eager mode"


# ------------------------------------------------------------------------------------------- for the backward


def describe_saved(variants: Any, leaf_name: NameLeaf) -> Iterator[Saved]:
    """What the backward reads, and from where."""
    if variants is None:
        return
    partitioned = variants.partitioned
    places = {
        slot: ".".join([leaf_name("input", number), *path])
        for number, value in reversed(list(enumerate(variants.inputs.values)))
        for slot, path in paths_of(value)
    }
    nodes = partitioned.backward.graph.find_nodes(op="placeholder")
    for node, source in zip(nodes, partitioned.backward_inputs, strict=True):
        fake = node.meta["val"]
        size = tuple(map(extent_text, fake.size())) if isinstance(fake, Tensor) else ()
        dtype = str(getattr(fake, "dtype", "int")).removeprefix("torch.")
        match source:
            case FromInput() | FromForward() if not isinstance(fake, Tensor):
                yield Saved(node.name, "a size", (), "int", 0)
            case FromInput(index):
                yield Saved(node.name, f"input {places.get(index, index)}", size, dtype, 0)
            case FromForward(index) if index < partitioned.num_forward:
                yield Saved(node.name, "a result", size, dtype, 0)
            case FromForward():
                yield Saved(node.name, "an intermediate", size, dtype, _nbytes(fake))
            case _:
                pass


def _nbytes(fake: Tensor) -> int:
    """Bytes with the sizes of the call that was traced."""
    return math.prod(map(hint, fake.size())) * fake.element_size()
