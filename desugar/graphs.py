"""Small things one does with graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx


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
    return fx.GraphModule(graph, copied)
