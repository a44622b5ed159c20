"""Splits the joint graph into a forward and a backward graph, and finds the source of each backward input.

PyTorch's min-cut partitioner decides which values are saved and which are recomputed. `partition` then normalizes the
forward: it returns its results and, after them, each saved value that is neither an input nor a result, once. The
wrapper holds inputs and results anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from desugar import _torch as torch_private
from desugar.ir.abstract_values import same_ints
from desugar.ir.fx_utils import (
    Results,
    clone_aliased_results,
    follow_views,
    output_nodes,
    set_outputs,
    tangent_dependencies,
    tangent_slots,
)
from desugar.ir.stages import BackwardInput, FromForward, FromInput, FromTangent, Partitioned, Traced
from desugar.ir.values import paths_of

# ---------------------------------------------------------------------------------------------------- partition

Partitioner = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def partition(
    traced: Traced, primals: list[Any], static_slots: list[int], partitioner: Partitioner
) -> Partitioned:
    """Splits a joint graph.

    Args:
        traced: A traced function with a backward. Its graph may be changed in place.
        primals: The fake tensors and symbolic ints of the inputs, by input slot.
        static_slots: Input slots of tensors that outlive the call (parameters); saving them costs no memory.
        partitioner: A partitioner with the interface of PyTorch's `min_cut_rematerialization_partition`.
    """
    _read_sizes_early(traced)
    behind = tangent_dependencies(traced.graph, tangent_slots(traced.graph))
    gradients = output_nodes(traced.graph)[traced.num_forward :]
    # If none of these tangents arrives, the gradient is `None` in eager mode, not zero.
    depends = tuple(behind[node] if isinstance(node, fx.Node) else frozenset() for node in gradients)
    before = Results.of(traced.graph, traced.num_forward)
    forward, backward = partitioner(
        traced.graph,
        [*primals, *traced.tangent_items],
        num_fwd_outputs=traced.num_forward,
        static_lifetime_input_indices=static_slots,
    )
    clone_aliased_results(forward, before)
    placeholders, returned = forward.graph.find_nodes(op="placeholder"), output_nodes(forward)
    outputs, saved = returned[: traced.num_forward], returned[traced.num_forward :]
    owners = {*placeholders, *(node for node in outputs if isinstance(node, fx.Node))}
    _replace_saved_views(forward, backward, owners)
    needed = {node.name for node in backward.graph.find_nodes(op="placeholder")}
    outputs += dict.fromkeys(node for node in saved if node.name in needed and node not in owners)
    set_outputs(forward, outputs)
    known: dict[str, BackwardInput] = {
        node.name: FromForward(n) for n, node in reversed([*enumerate(outputs)]) if isinstance(node, fx.Node)
    }
    known |= {node.name: FromInput(n) for n, node in enumerate(placeholders)}
    known |= {name: FromTangent(slot) for name, slot in tangent_slots(traced.graph).items()}
    sources = tuple(known[node.name] for node in backward.graph.find_nodes(op="placeholder"))
    return Partitioned(forward, backward, traced.num_forward, sources, depends)


def _read_sizes_early(traced: Traced) -> None:
    """Makes a joint graph read sizes from the forward's tensors instead of the tangents; changes the graph in place.

    The partitioner saves each symbol of a backward input that a node of the joint graph binds. Only data determines
    some sizes. The trace reads such a size from a tangent, a placeholder, before the forward op that makes it. Each run
    of the function has a new symbol for it: the tangents have the symbols of the first run, and the forward has the
    symbols of the second. So a symbol that no tensor of the forward has is a size of the tangent's result.
    """
    graph, extents = traced.graph, dict[Any, tuple[fx.Node, int]]()
    behind = tangent_dependencies(graph, tangent_slots(graph))
    for node, slots in behind.items():
        tensor = node.meta.get("val")
        for dim, extent in enumerate(tensor.shape if isinstance(tensor, Tensor) and not slots else ()):
            if isinstance(extent, torch.SymInt):
                extents.setdefault(extent.node.expr, (node, dim))
    computed = dict(zip(traced.outputs.positions, output_nodes(graph), strict=False))
    for number, value in traced.tangents:
        results = {path: slot for slot, path in paths_of(traced.outputs.values[number])}
        for slot, path in paths_of(value):
            result = computed.get(results.get(path, -1))
            for dim, extent in enumerate(traced.tangent_items[slot].shape):
                if isinstance(result, fx.Node) and isinstance(extent, torch.SymInt):
                    extents.setdefault(extent.node.expr, (result, dim))
    for node, slots in behind.items():
        size = node.meta.get("val")
        if slots and isinstance(size, torch.SymInt) and (found := extents.get(size.node.expr)):
            with graph.graph.inserting_after(found[0]):
                of_result = graph.graph.call_function(torch.ops.aten.sym_size.int, found)
            of_result.meta["val"] = found[0].meta["val"].shape[found[1]]
            node.replace_all_uses_with(of_result)
            graph.graph.erase_node(node)


def restride_saved(partitioned: Partitioned, strides: Sequence[Sequence[Any] | None]) -> None:
    """Sets the strides of saved tensors in the backward graph to the strides that the compiled forward reports.

    Args:
        partitioned: The split graphs; the metadata of the backward's placeholders is changed in place.
        strides: The reported stride of each output of the forward; None changes nothing.
    """
    placeholders = partitioned.backward.graph.find_nodes(op="placeholder")
    for node, source in zip(placeholders, partitioned.backward_inputs, strict=True):
        stride = strides[source.index] if isinstance(source, FromForward) else None
        value = node.meta["val"]
        if isinstance(value, Tensor) and stride is not None and not same_ints(value.stride(), stride):
            node.meta["val"] = value.as_strided(value.size(), tuple(stride))


# ------------------------------------------------------------------------------------------------- saved views


def _replace_saved_views(
    forward: fx.GraphModule, backward: fx.GraphModule, owners: Collection[fx.Node]
) -> None:
    """Makes the backward take the owner of each saved view, and compute the view.

    The partitioner may save a view (a transpose, a slice) of an input or a result. The runtime wrapper holds the input
    or result anyway, and autograd detects a later write only through it.

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


# ---------------------------------------------------------------------------------- PyTorch's partitioner


def min_cut(
    graph: fx.GraphModule, joint_inputs: list[Any], **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Splits a joint graph with PyTorch's min-cut partitioner, for backends without a partitioner of their own."""
    return torch_private.min_cut_rematerialization_partition(graph, joint_inputs, **options)
