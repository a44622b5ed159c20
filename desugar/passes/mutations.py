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

from desugar.ir.fx_utils import is_view, output_nodes, set_outputs
from desugar.ir.stages import BackwardInput, FromForward, FromInput, Partitioned

# ---------------------------------------------------------------------------------------------------- passes


def store_results(graph: fx.GraphModule, stores: Mapping[int, int], kept: Collection[int] = ()) -> None:
    """Stores outputs of a graph in its inputs.

    Args:
        graph: A functional graph; changed in place.
        stores: Input slot -> position of the output that is stored there.
        kept: Positions of stored outputs that the graph still returns; the other stored outputs become None.
    """
    if not stores:
        return
    outputs, placeholders = output_nodes(graph), graph.graph.find_nodes(op="placeholder")
    (end,) = graph.graph.find_nodes(op="output")
    with graph.graph.inserting_before(end):
        for slot, position in stores.items():
            node = graph.graph.call_function(
                torch.ops.aten.copy_.default, (placeholders[slot], outputs[position])
            )
            node.meta["val"] = placeholders[slot].meta["val"]
    stored = set(stores.values()).difference(kept)
    set_outputs(graph, [None if n in stored else node for n, node in enumerate(outputs)])


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
    roots = {placeholders[slot] for slot in written}
    sources: list[BackwardInput] = []
    (end,) = graph.graph.find_nodes(op="output")
    for source in partitioned.backward_inputs:
        node = _forward_node(source, outputs, placeholders)
        if node is not None and _view_root(node) in roots:
            with graph.graph.inserting_before(end):
                copy = graph.graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta["val"] = node.meta["val"]
            sources.append(FromForward(len(outputs)))
            outputs.append(copy)
        else:
            sources.append(source)
    set_outputs(graph, outputs)
    return replace(partitioned, backward_inputs=tuple(sources))


def _forward_node(source: BackwardInput, outputs: list[Any], placeholders: list[fx.Node]) -> fx.Node | None:
    match source:
        case FromInput(index):
            return placeholders[index]
        case FromForward(index):
            return outputs[index]
        case _:
            return None


def _view_root(node: fx.Node) -> fx.Node:
    """Follows view ops back to the node that owns the memory."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node
