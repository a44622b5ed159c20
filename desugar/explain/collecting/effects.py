"""Describes aliasing and mutation as sentences, and the tensors that are saved for the backward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from desugar.explain.collecting.arguments import dtype_text, extent_text
from desugar.explain.collecting.names import Names
from desugar.explain.records import Saved
from desugar.ir.abstract_values import hint
from desugar.ir.stages import FromForward, FromInput
from desugar.ir.values import Same, Value, View, inner_names, is_wrapper, paths_of
from subclasses.layout import field_name

# ---------------------------------------------------------------------------------------------------- aliasing


def with_inner(named: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yields named live leaves, then the inner tensors of the wrappers among them, level by level."""
    waiting = list(named)
    for name, leaf in waiting:  # the list grows
        yield name, leaf
        if is_wrapper(leaf):
            waiting += [(f"{name}.{field_name(field)}", getattr(leaf, field)) for field in inner_names(leaf)]


def describe_aliasing(names: Names, leaves: Sequence[Any]) -> Iterator[str]:
    """Yields which tensors share memory: in the compiled call, among the inputs, between inputs and results."""
    places: dict[int, list[str]] = {}
    for name, leaf in with_inner([(names.of("input", n), leaf) for n, leaf in enumerate(leaves)]):
        if isinstance(leaf, Tensor) and not is_wrapper(leaf):
            places.setdefault(id(leaf), []).append(name)
    yield from _shared(places, "are one tensor in this call")
    for number, value in enumerate(names.inputs.values):
        if isinstance(value, Same):
            yield f"{names.of('input', number)} is the same object as {names.of('input', value.index)}"
    yield from _shared(names.places, "are one tensor: one input of the graph")
    for name, value in names.results().items():
        yield from _aliases_of_result(name, value, names)


def _aliases_of_result(name: str, value: Value, names: Names) -> Iterator[str]:
    match value:
        case Same():
            yield f"{name} is the very object {names.of_source(value)}"
        case View():
            yield f"{name} is a view of {names.of_source(value)}"
    for slot, path in paths_of(value):
        if slot in names.outputs.inputs:
            source = names.place(names.outputs.inputs[slot], "of an input")
            yield f"{'.'.join([name, *map(field_name, path)])} is the tensor {source}"


def _shared(places: dict[int, list[str]], how: str) -> Iterator[str]:
    return (f"{' and '.join(names)} {how}" for names in places.values() if len(names) > 1)


def describe_mutation(names: Names) -> Iterator[str]:
    """Yields the mutations of the function, and how the program applies them."""
    outputs = names.outputs
    for leaf, _ in outputs.writes:
        yield f"{names.of('input', leaf)} is written to; copy_ after the graph, so that autograd records it"
    for slot, _ in outputs.stores:
        yield f"{names.place(slot, f'input {slot}')} is written to; the graph stores its new value"
    for leaf, name, _ in outputs.assigns:
        yield f"{names.of('input', leaf, name)} is replaced by another tensor"
    for leaf, path, rise in outputs.versions:
        yield f"the version counter of {names.of('input', leaf, *path)} rises by {rise}, as in eager mode"


# ------------------------------------------------------------------------------------------- for the backward


def describe_saved(program: Any, names: Names) -> Iterator[Saved]:
    """Yields the values that the backward reads, and their sources."""
    split = program.spec.split
    if split is None:
        return
    nodes = program.backward.graph.find_nodes(op="placeholder")
    for node, source in zip(nodes, split.backward_inputs, strict=True):
        fake, nbytes = node.meta["val"], 0
        match source:
            case FromInput() | FromForward() if not isinstance(fake, Tensor):
                yield Saved(node.name, "a size", (), "int", 0)
                continue
            case FromInput(index):
                origin = f"input {names.place(index, str(index))}"
            case FromForward(index) if index < split.num_forward:
                origin = "a result"
            case FromForward():
                origin = "an intermediate"
                nbytes = math.prod(map(hint, fake.size())) * fake.element_size()  # at the sizes of the call
            case _:
                continue
        yield Saved(node.name, origin, tuple(map(extent_text, fake.size())), dtype_text(fake), nbytes)
