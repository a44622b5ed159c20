"""Small things one does with graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from desugar import _torch as private


def output_nodes(graph: fx.GraphModule) -> list[Any]:
    """What a graph returns, flat."""
    (output,) = graph.graph.find_nodes(op="output")
    return list(output.args[0])


def set_outputs(graph: fx.GraphModule, outputs: list[Any]) -> None:
    """Makes a graph return `outputs`."""
    (output,) = graph.graph.find_nodes(op="output")
    meta: Mapping[str, Any] = {
        k: v for k, v in output.meta.items() if k not in ("desc", "output_stack_traces")
    }
    output.args = (tuple(outputs),)
    output.meta = dict(meta)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def fake_inputs(graph: fx.GraphModule) -> list[Any]:
    """The fake tensors and symbolic ints that a graph takes."""
    return [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]


def copy_graph(graph: fx.GraphModule) -> fx.GraphModule:
    """A graph of its own with the same nodes, names and metadata."""
    copied = fx.Graph()
    output = copied.graph_copy(graph.graph, {})
    copied.output(output)
    (old,) = graph.graph.find_nodes(op="output")
    (new,) = copied.find_nodes(op="output")
    new.meta = dict(old.meta)
    return private.make_graph_module(graph, copied)


def is_view(node: fx.Node) -> bool:
    """Whether a node is an op whose result is a view of its first argument."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or schema.is_mutable:
        return False
    return any(result.alias_info is not None for result in schema.returns) and isinstance(
        node.args[0], fx.Node
    )


def keep_results_apart(graph: fx.GraphModule, before: list[Any]) -> None:
    """Copies results that graph passes have made one with an input or with another result.

    `zeros + x` becomes `x`, and two equal sums become one; a user who then writes to one result in place must
    not meet the change elsewhere.

    Args:
        graph: A graph after passes; changed in place.
        before: The names of the same graph's result nodes before the passes (None for constants).
    """
    outputs = output_nodes(graph)
    placeholders = {node.name for node in graph.graph.find_nodes(op="placeholder")}
    (end,) = graph.graph.find_nodes(op="output")
    first: dict[fx.Node, str] = {}
    changed = False
    for n, (node, name) in enumerate(zip(outputs, before, strict=False)):
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        is_input = node.op == "placeholder" and name not in placeholders
        if is_input or first.setdefault(node, name) != name:
            with graph.graph.inserting_before(end):
                outputs[n] = graph.graph.call_function(torch.ops.aten.clone.default, (node,))
            outputs[n].meta["val"] = node.meta["val"]
            changed = True
    if changed:
        set_outputs(graph, outputs)


def result_names(graph: fx.GraphModule, count: int) -> list[Any]:
    """The names of the first output nodes of a graph."""
    return [node.name if isinstance(node, fx.Node) else None for node in output_nodes(graph)[:count]]
