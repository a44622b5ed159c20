"""Splits the joint graph into a forward and a backward graph, and finds the source of each backward input.

PyTorch's min-cut partitioner decides which values are saved and which are recomputed. The pass then normalizes the
forward: it returns its results and, after them, each saved value that is neither an input nor a result, once. The
wrapper holds inputs and results anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from desugar import _torch as private
from desugar.ir.fx_utils import (
    Results,
    clone_aliased_results,
    output_nodes,
    set_outputs,
    tangent_dependencies,
    tangent_slots,
)
from desugar.ir.stages import BackwardInput, FromForward, FromInput, FromTangent, Partitioned, Traced
from desugar.ir.values import paths_of
from desugar.passes.saved_views import replace_saved_views

# ---------------------------------------------------------------------------------------------------- split

Split = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def partition(traced: Traced, primals: list[Any], static_slots: list[int], split: Split) -> Partitioned:
    """Splits a joint graph.

    Args:
        traced: A traced function with a backward. Its graph may be changed in place.
        primals: The fake tensors and symbolic ints of the inputs, by input slot.
        static_slots: Input slots of tensors that outlive the call (parameters); saving them costs no memory.
        split: A partitioner with the interface of PyTorch's `min_cut_rematerialization_partition`.
    """
    _read_sizes_of_results(traced)
    depends = tangent_dependence(traced)
    joint_inputs = [*primals, *traced.tangent_items]
    before = Results.of(traced.graph, traced.num_forward)
    forward, backward = split(
        traced.graph,
        joint_inputs,
        num_fwd_outputs=traced.num_forward,
        static_lifetime_input_indices=static_slots,
    )
    clone_aliased_results(forward, before)
    placeholders = {node.name: n for n, node in enumerate(forward.graph.find_nodes(op="placeholder"))}
    results = output_nodes(forward)
    owners = set(forward.graph.find_nodes(op="placeholder"))
    owners.update(node for node in results[: traced.num_forward] if isinstance(node, fx.Node))
    replace_saved_views(forward, backward, owners)
    needed = {node.name for node in backward.graph.find_nodes(op="placeholder")}
    outputs = list(results[: traced.num_forward])
    for node in results[traced.num_forward :]:
        if node.name in needed and node.name not in placeholders and node not in outputs:
            outputs.append(node)
    set_outputs(forward, outputs)
    known: dict[str, BackwardInput] = {
        node.name: FromForward(n) for n, node in reversed([*enumerate(outputs)]) if isinstance(node, fx.Node)
    }
    known |= {name: FromInput(n) for name, n in placeholders.items()}
    known |= {name: FromTangent(slot) for name, slot in tangent_slots(traced.graph).items()}
    sources = tuple(known[node.name] for node in backward.graph.find_nodes(op="placeholder"))
    return Partitioned(forward, backward, traced.num_forward, sources, depends)


def _read_sizes_of_results(traced: Traced) -> None:
    """Makes a joint graph read sizes from results instead of their tangents; changes the graph in place.

    The partitioner saves each symbol of a backward input that a node of the joint graph binds. Only data determines
    some sizes, and each run of the function has a new symbol for such a size. The tangents have the symbols of the
    first run, and the forward has the symbols of the second. So no forward node binds the symbol of a tangent.
    """
    graph = traced.graph
    computed = dict(zip(traced.outputs.returned, output_nodes(graph), strict=False))
    extents: dict[Any, tuple[fx.Node, int]] = {}
    for number, value in traced.tangents:
        slots = {path: slot for slot, path in paths_of(traced.outputs.values[number])}
        for slot, path in paths_of(value):
            result = computed.get(slots.get(path, -1))
            for dim, extent in enumerate(traced.tangent_items[slot].shape):
                if isinstance(result, fx.Node) and isinstance(extent, torch.SymInt):
                    extents.setdefault(extent.node.expr, (result, dim))
    for node, behind in tangent_dependencies(graph, tangent_slots(graph)).items():
        size = node.meta.get("val")
        if behind and isinstance(size, torch.SymInt) and (found := extents.get(size.node.expr)):
            with graph.graph.inserting_after(found[0]):
                of_result = graph.graph.call_function(torch.ops.aten.sym_size.int, found)
            of_result.meta["val"] = found[0].meta["val"].shape[found[1]]
            node.replace_all_uses_with(of_result)
            graph.graph.erase_node(node)


def tangent_dependence(traced: Traced) -> tuple[frozenset[int], ...]:
    """Returns, per gradient output of the joint graph, the tangent slots that it depends on.

    If none of these tangents arrives, the gradient is `None` in eager mode, not zero.
    """
    behind = tangent_dependencies(traced.graph, tangent_slots(traced.graph))
    gradients = output_nodes(traced.graph)[traced.num_forward :]
    return tuple(behind[node] if isinstance(node, fx.Node) else frozenset() for node in gradients)


# ---------------------------------------------------------------------------------- PyTorch's partitioner


def min_cut(
    graph: fx.GraphModule, joint_inputs: list[Any], **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Splits a joint graph with PyTorch's min-cut partitioner, for backends without a partitioner of their own."""
    return private.min_cut_rematerialization_partition(graph, joint_inputs, **options)
