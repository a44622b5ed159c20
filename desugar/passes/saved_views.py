"""Saved views, replaced by what they are views of.

The partitioner may save a view (a transpose, a slice) of an input or of a result. Its owner is at hand anyway,
and only through its owner does autograd notice a later write. So the backward takes the owner and makes the
view itself.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from desugar.ir.fx_utils import is_view

# --------------------------------------------------------------------------------------------------- the pass


def root_saved_views(forward: fx.GraphModule, backward: fx.GraphModule, owners: Collection[fx.Node]) -> None:
    """Makes the backward take the owner of each saved view.

    Args:
        forward: The forward graph, which holds the saved nodes.
        backward: The backward graph, whose placeholders have the names of saved nodes; changed in place.
        owners: Nodes of the forward that the backward can have without saving more: inputs and results.
    """
    saved = {node.name: node for node in forward.graph.nodes}
    for placeholder in backward.graph.find_nodes(op="placeholder"):
        node = saved.get(placeholder.name)
        chain = _chain(node, owners) if node is not None and node.op == "call_function" else []
        if chain:
            _move(backward, placeholder, chain)
    backward.graph.lint()
    backward.recompile()


def _chain(node: fx.Node, owners: Collection[fx.Node]) -> list[fx.Node]:
    """The view ops from an owner to a node, the first one first; empty if there is no owner or a size is missing."""
    chain: list[fx.Node] = []
    while node not in owners:
        if not is_view(node):
            return []
        if any(other.op != "placeholder" for other in node.all_input_nodes if other is not node.args[0]):
            return []
        chain.insert(0, node)
        node = node.args[0]  # type: ignore[assignment]
    return chain


def _move(backward: fx.GraphModule, placeholder: fx.Node, chain: list[fx.Node]) -> None:
    """Computes a chain of views in the backward, in place of the placeholder that had its result."""
    known = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    last = list(known.values())[-1]

    def find(node: fx.Node) -> fx.Node:
        if node.name not in known:
            with backward.graph.inserting_before(placeholder):
                known[node.name] = backward.graph.placeholder(node.name)
            known[node.name].meta = dict(node.meta)
        return known[node.name]

    copies: dict[fx.Node, fx.Node] = {}
    for node in chain:
        for other in node.all_input_nodes:
            if other not in copies and other not in chain:
                copies[other] = find(other)
    after = last
    for node in chain:
        with backward.graph.inserting_after(after):
            after = copies[node] = backward.graph.node_copy(node, lambda n: copies[n])
    placeholder.replace_all_uses_with(after)
    backward.graph.erase_node(placeholder)
