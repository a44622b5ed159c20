"""Prunes the backward graph for calls where only some of the results get a gradient.

Autograd formulas are linear in the incoming gradients, and eager mode does not run formulas that no gradient reaches.
So a value computed only from missing tangents is zero. The pass removes additions of such values, and then the nodes
and the input tensors without users.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, fx

from desugar.ir.abstract_values import same_ints
from desugar.ir.fx_utils import copy_graph, output_nodes, set_outputs, tangent_dependencies


def prune_missing(
    backward: fx.GraphModule,
    tangents: dict[str, int],
    missing: Collection[int],
    depends: list[frozenset[int]],
) -> fx.GraphModule:
    """Returns a copy of the backward graph without the computations that depend on missing tangents only.

    An output that depends on tangents, none of which arrives, becomes None.

    Args:
        backward: The graph for all tangents.
        tangents: Placeholder name -> tangent slot.
        missing: The tangent slots that do not arrive.
        depends: Per output, the tangent slots that it depends on.
    """
    graph = copy_graph(backward)
    behind, gone = tangent_dependencies(graph, tangents), frozenset(missing)
    zeros = {node for node, slots in behind.items() if slots and slots <= gone}
    for node in list(graph.graph.nodes):
        if node not in zeros and node.target is torch.ops.aten.add.Tensor and not node.kwargs:
            _drop_zero_summand(node, zeros)
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default  # a summand may have other strides than the sum had
    outputs = [
        node if not depends[n] or depends[n] - gone else None for n, node in enumerate(output_nodes(graph))
    ]
    set_outputs(graph, outputs)
    for node in reversed(graph.graph.find_nodes(op="placeholder")):
        if not node.users and isinstance(node.meta["val"], Tensor):
            graph.graph.erase_node(
                node
            )  # an int may be in the size of another input, which the compiler reads
    graph.recompile()
    return graph


def _drop_zero_summand(node: fx.Node, zeros: Collection[fx.Node]) -> None:
    left, right = node.args[:2]
    for zero, other in ((left, right), (right, left)):
        if zero in zeros and isinstance(other, fx.Node) and _has_same_type(node, other):
            node.replace_all_uses_with(other)
            return


def _has_same_type(one: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes hold tensors of the same size and dtype."""
    a, b = (n.meta.get("val") for n in (one, other))
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    return a.dtype == b.dtype and same_ints(a.size(), b.size())
