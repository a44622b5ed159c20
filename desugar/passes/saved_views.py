"""Replaces saved views by the tensors that they are views of.

The partitioner may save a view (a transpose, a slice) of an input or a result. The wrapper holds the input or result
anyway, and autograd detects a later write only through it. So the backward takes the input or result and computes
the view itself.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from desugar.ir.fx_utils import follow_views


def replace_saved_views(
    forward: fx.GraphModule, backward: fx.GraphModule, owners: Collection[fx.Node]
) -> None:
    """Makes the backward take the owner of each saved view, and compute the view.

    Args:
        forward: The forward graph, which holds the saved nodes.
        backward: The backward graph, whose placeholders have the names of saved nodes; changed in place.
        owners: Nodes of the forward that are free to save: inputs and results.
    """
    nodes = {node.name: node for node in forward.graph.nodes}
    for placeholder in backward.graph.find_nodes(op="placeholder"):
        node = nodes.get(placeholder.name)
        chain = _view_chain(node, owners) if node is not None and node.op == "call_function" else []
        if chain:
            _compute_in_backward(backward, placeholder, chain)
    backward.graph.lint()
    backward.recompile()


def _view_chain(node: fx.Node, owners: Collection[fx.Node]) -> list[fx.Node]:
    """Returns the view ops from an owner to a node, in order.

    Returns an empty list if the node is not a view of an owner. Returns an empty list, too, if the forward computes an
    argument of a view op (a size, for instance).
    """
    owner, chain = follow_views(node, owners)
    others = (other for view in chain for other in view.all_input_nodes if other is not view.args[0])
    return chain if owner in owners and all(other.op == "placeholder" for other in others) else []


def _compute_in_backward(backward: fx.GraphModule, placeholder: fx.Node, chain: list[fx.Node]) -> None:
    """Copies a chain of view ops to the backward; its result replaces a placeholder."""
    placeholders = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    last = list(placeholders.values())[-1]

    def find_or_add(node: fx.Node) -> fx.Node:
        if node.name not in placeholders:
            with backward.graph.inserting_before(placeholder):
                placeholders[node.name] = backward.graph.placeholder(node.name)
            placeholders[node.name].meta = dict(node.meta)
        return placeholders[node.name]

    copies: dict[fx.Node, fx.Node] = {}
    for node in chain:
        for argument in node.all_input_nodes:
            if argument not in copies and argument not in chain:
                copies[argument] = find_or_add(argument)
    for node in chain:
        with backward.graph.inserting_after(last):
            last = copies[node] = backward.graph.node_copy(node, lambda n: copies[n])
    placeholder.replace_all_uses_with(last)
    backward.graph.erase_node(placeholder)
