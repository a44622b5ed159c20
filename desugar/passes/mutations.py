"""Writes the new values of mutated inputs at the end of the forward graph.

Functionalization has turned every mutation into a value. One `copy_` stores the last value of each mutated input,
after every node that reads the input. If the backward reads the input's old value, the forward saves a clone of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from desugar.errors import DesugarError
from desugar.ir.fx_utils import follow_views, output_nodes, set_outputs
from desugar.ir.stages import BackwardInput, FromForward, FromInput, Partitioned

# ---------------------------------------------------------------------------------------------------- passes


def store_results(
    graph: fx.GraphModule,
    stores: Mapping[int, int],
    read_by_backward: Collection[int] = (),
    stored_views: Mapping[int, int] | None = None,
) -> None:
    """Stores outputs of a graph in its inputs.

    Args:
        graph: A functional graph; changed in place.
        stores: Input slot -> position of the output that is stored there.
        read_by_backward: Positions of stored outputs that the graph still returns; the other stored outputs become
            None.
        stored_views: Position of an output that is a view of a stored value -> input slot of that store.

    Raises:
        DesugarError: An output of `stored_views` cannot be taken as a view of the input itself.
    """
    if not stores:
        return
    outputs, placeholders = output_nodes(graph), graph.graph.find_nodes(op="placeholder")
    (end,) = graph.graph.find_nodes(op="output")
    stored_nodes = {slot: outputs[position] for slot, position in stores.items()}
    with graph.graph.inserting_before(end):
        for position, slot in (stored_views or {}).items():
            outputs[position] = _view_again(graph, outputs[position], stored_nodes[slot], placeholders[slot])
        for slot, position in stores.items():
            node = graph.graph.call_function(
                torch.ops.aten.copy_.default, (placeholders[slot], outputs[position])
            )
            node.meta["val"] = placeholders[slot].meta["val"]
    stored = set(stores.values()).difference(read_by_backward)
    set_outputs(graph, [None if n in stored else node for n, node in enumerate(outputs)])


def _view_again(graph: fx.GraphModule, view: fx.Node, value: fx.Node, home: fx.Node) -> fx.Node:
    """Takes a view of an input's new value as a view of the input, which has the value once it is stored there."""
    owner, chain = follow_views(view, (value,))
    if owner is not value or _extents(value) != _extents(home):
        raise DesugarError(
            "a result holds a view of an argument that is written to, in another memory order than the argument",
            instead="return a clone()",
        )
    made = home
    for node in chain:
        made = graph.graph.call_function(node.target, (made, *node.args[1:]), dict(node.kwargs))  # type: ignore[arg-type]
        made.meta = dict(node.meta)
    return made


def _extents(node: fx.Node) -> tuple[str, ...]:
    """Returns size, stride and offset of a node's tensor; as text, since comparing symbols would guard."""
    value = node.meta["val"]
    return str(tuple(value.size())), str(tuple(value.stride())), str(value.storage_offset())


def keep_old_values(partitioned: Partitioned, written: set[int]) -> Partitioned:
    """Makes the forward clone each mutated input, or view of one, that the backward reads.

    Args:
        partitioned: The split graphs; the forward graph is changed in place.
        written: Input slots whose memory changes before the backward runs.

    Returns:
        The same graphs, with the clones as backward inputs.
    """
    graph = partitioned.forward
    outputs, placeholders = output_nodes(graph), graph.graph.find_nodes(op="placeholder")
    read: dict[type, list[Any]] = {FromInput: placeholders, FromForward: list(outputs)}
    roots = {placeholders[slot] for slot in written}
    sources: list[BackwardInput] = []
    (end,) = graph.graph.find_nodes(op="output")
    for source in partitioned.backward_inputs:
        node = read[type(source)][source.index] if type(source) in read else None
        if node is not None and follow_views(node)[0] in roots:
            with graph.graph.inserting_before(end):
                copy = graph.graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta["val"] = node.meta["val"]
            sources.append(FromForward(len(outputs)))
            outputs.append(copy)
        else:
            sources.append(source)
    set_outputs(graph, outputs)
    return replace(partitioned, backward_inputs=tuple(sources))
