"""Writes to inputs, put at the end of the forward graph.

Functionalization turned every write into a value; here the last value of each written input is stored with one
`copy_`, after everything that reads the input. A backward that reads the input's old value gets a copy of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from desugar.ir.fx_utils import is_view, output_nodes, set_outputs
from desugar.ir.stages import BackwardInput, FromForward, FromInput, Partitioned

# ------------------------------------------------------------------------------------------------- the passes


def store_results(graph: fx.GraphModule, stores: Mapping[int, int], kept: Collection[int] = ()) -> None:
    """Stores outputs of a graph in its inputs.

    Args:
        graph: A functional graph, which is changed.
        stores: Input slot -> output.
        kept: Outputs that are returned all the same; the others become None.
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
    """Makes the forward copy what the backward reads of inputs that are written to.

    Args:
        partitioned: The split graphs; the forward is changed.
        written: Input slots whose memory changes before the backward runs.
    """
    graph = partitioned.forward
    outputs, placeholders = output_nodes(graph), graph.graph.find_nodes(op="placeholder")
    roots = {placeholders[slot] for slot in written}
    sources: list[BackwardInput] = []
    (end,) = graph.graph.find_nodes(op="output")
    for source in partitioned.backward_inputs:
        node = _node_of(source, outputs, placeholders)
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


def _node_of(source: BackwardInput, outputs: list[Any], placeholders: list[fx.Node]) -> fx.Node | None:
    match source:
        case FromInput(index):
            return placeholders[index]
        case FromForward(index):
            return outputs[index]
        case _:
            return None


def _view_root(node: fx.Node) -> fx.Node:
    """The node whose memory a node is a view of."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node
