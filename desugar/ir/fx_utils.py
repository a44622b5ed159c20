"""Small things one does with graphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

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
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), Tensor):
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


def read_sizes_early(graph: fx.GraphModule) -> None:
    """Makes a joint graph read sizes from the forward's own tensors, where they have them; changes it in place.

    Gradients are inputs of such a graph, so a size that only data tells is first met in one, and read there.
    """
    nodes = list(graph.graph.nodes)
    late = {node for node in nodes if node.op == "placeholder" and "tangents" in str(node.target)}
    sizes = [node for node in nodes if isinstance(node.meta.get("val"), torch.SymInt)]
    read_late = [node for node in sizes if node.op == "call_function" and node.args[0] in late]
    if not read_late:
        return
    for node in nodes:
        if any(parent in late for parent in node.all_input_nodes):
            late.add(node)
    early = [node for node in nodes if node not in late]
    for node in read_late:
        size = _of_extent(node.meta["val"], early)
        if size is not None:
            node.replace_all_uses_with(size)


def _of_extent(value: torch.SymInt, nodes: list[fx.Node]) -> fx.Node | None:
    """A new node for an extent, read from the first of the nodes that has it."""
    for node in nodes:
        tensor = node.meta.get("val")
        for dim, extent in enumerate(tensor.shape if isinstance(tensor, Tensor) else ()):
            if isinstance(extent, torch.SymInt) and extent.node.expr == value.node.expr:
                with node.graph.inserting_after(node):
                    size = node.graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
                size.meta["val"] = value
                return size
    return None


def first_random(graph: fx.GraphModule) -> str | None:
    """An op of the graph that draws random numbers."""
    for node in graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return str(node.target)
    return None


def autograd_nodes(results: Iterable[Any]) -> Iterator[Any]:
    """The nodes of the autograd graph that leads to results, each once."""
    stack = [leaf.grad_fn for leaf in results if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    seen = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(parent for parent, _ in node.next_functions if parent is not None)


def tangents_behind(graph: fx.GraphModule) -> dict[fx.Node, frozenset[int]]:
    """Per node of a joint graph, the slots of the tangents from which it is computed."""
    behind: dict[fx.Node, frozenset[int]] = {}
    count = 0
    for node in graph.graph.nodes:
        if node.op == "placeholder" and "tangents" in str(node.target):
            behind[node] = frozenset({count})
            count += 1
        else:
            behind[node] = frozenset().union(*(behind[parent] for parent in node.all_input_nodes))
    return behind
