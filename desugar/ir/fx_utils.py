"""Helpers that read and edit `torch.fx` graphs, their results and the autograd graph."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from desugar import _torch as torch_private
from subclasses._torch import storage_key


def output_nodes(graph: fx.GraphModule) -> list[Any]:
    """Returns the flat list of values that a graph returns: nodes, and constants such as None."""
    (output,) = graph.graph.find_nodes(op="output")
    return list(output.args[0])


def output_items(graph: fx.GraphModule) -> tuple[Any, ...]:
    """Returns the fake tensor or symbolic number of each value that a graph returns; a constant unchanged."""
    return tuple(node.meta["val"] if isinstance(node, fx.Node) else node for node in output_nodes(graph))


def set_outputs(graph: fx.GraphModule, outputs: list[Any]) -> None:
    """Makes a graph return `outputs`; removes dead nodes and recompiles it."""
    (output,) = graph.graph.find_nodes(op="output")
    meta: Mapping[str, Any] = {
        k: v for k, v in output.meta.items() if k not in ("desc", "output_stack_traces")
    }
    output.args = (tuple(outputs),)
    output.meta = dict(meta)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def result_leaves(result: Any) -> list[Any]:
    """Returns the leaves of a function's result; None is a leaf.

    Dynamo's graphs return flat tuples. Dynamo itself flattens and rebuilds every other structure that the user's
    function takes or returns.
    """
    import optree  # the runtime wrappers of loaded programs do not need it

    return optree.tree_leaves(result, none_is_leaf=True)


def tensor_leaves(tree: Any) -> list[Tensor]:
    """Returns the tensors among the leaves of a tree."""
    return [leaf for leaf in result_leaves(tree) if isinstance(leaf, Tensor)]


def fake_inputs(graph: fx.GraphModule) -> list[Any]:
    """Returns the fake tensors and symbolic ints of a graph's placeholders."""
    return [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]


def copy_graph(graph: fx.GraphModule) -> fx.GraphModule:
    """Copies a graph with its node names and metadata."""
    copied = fx.Graph()
    output = copied.graph_copy(graph.graph, {})
    copied.output(output)
    (old,) = graph.graph.find_nodes(op="output")
    (new,) = copied.find_nodes(op="output")
    new.meta = dict(old.meta)
    return torch_private.make_graph_module(graph, copied)


def is_view(node: fx.Node) -> bool:
    """Returns whether a node calls a functional op whose schema says that a result aliases an argument.

    False for an op that mutates an argument, and for a first argument that is not a node.
    """
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or schema.is_mutable:
        return False
    return any(r.alias_info is not None for r in schema.returns) and isinstance(node.args[0], fx.Node)


def follow_views(node: fx.Node, owners: Collection[fx.Node] = ()) -> tuple[fx.Node, list[fx.Node]]:
    """Follows view ops back to one of `owners`, or to the node that owns the memory.

    Returns:
        That node, and the view ops from there to `node`, in order.
    """
    chain: list[fx.Node] = []
    while node not in owners and is_view(node):
        chain.insert(0, node)
        node = node.args[0]  # type: ignore[assignment]
    return node, chain


@dataclass(frozen=True, slots=True)
class Results:
    """The results of a graph before passes: their names, and the fake tensors of inputs and results by name."""

    names: list[Any]
    values: dict[str, Any]

    @classmethod
    def of(cls, graph: fx.GraphModule, count: int) -> Results:
        """Records the first `count` results; the name of a constant is None."""
        results = [n if isinstance(n, fx.Node) else None for n in output_nodes(graph)[:count]]
        nodes = [*graph.graph.find_nodes(op="placeholder"), *filter(None, results)]
        return cls([n and n.name for n in results], {n.name: n.meta.get("val") for n in nodes})

    def share(self, one: str, other: str) -> bool:
        """Returns whether two of the tensors share memory."""
        tensors = [t for t in (self.values.get(one), self.values.get(other)) if isinstance(t, Tensor)]
        return len(tensors) == 2 and len({*map(storage_key, tensors)}) == 1


def clone_aliased_results(graph: fx.GraphModule, before: Results) -> None:
    """Clones each result that graph passes replaced with an input or with another result.

    Passes turn `zeros + x` into `x`, and merge two equal sums. Without a clone, an in-place write to one result
    would also change the input or the other result. A view of the whole input shares its memory already.

    Args:
        graph: A graph after passes; changed in place.
        before: The results of the same graph before the passes.
    """
    outputs = output_nodes(graph)
    (end,) = graph.graph.find_nodes(op="output")
    first: dict[fx.Node, str] = {}
    for n, (node, name) in enumerate(zip(outputs, before.names, strict=False)):
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), Tensor):
            continue
        is_replaced = first.setdefault(node, name) != name
        if node.op == "placeholder" and node.name != name:
            is_replaced = not before.share(node.name, name)
        if is_replaced:
            with graph.graph.inserting_before(end):
                outputs[n] = graph.graph.call_function(torch.ops.aten.clone.default, (node,))
            outputs[n].meta["val"] = node.meta["val"]
    if outputs != output_nodes(graph):
        set_outputs(graph, outputs)


def replace_floats(graph: fx.GraphModule, mode: Any) -> None:
    """Replaces arithmetic with symbolic floats in a traced graph by arithmetic with the tensors that hold them.

    Dynamo passes a float that changes from call to call to its graph as a tensor without dimensions, and reads it there
    with `item()`. Compiled kernels take tensors, not numbers from tensors. So PyTorch's own pass turns arithmetic with
    the number into arithmetic with the tensor. For an op that accepts only numbers, desugaring makes the float a
    constant of the program.

    Args:
        graph: The graph; changed in place.
        mode: The fake mode of its trace.

    Raises:
        TensorifyScalarRestartAnalysis: An op takes such a float as a number. Dynamo captures the function again.
    """
    items = graph.graph.find_nodes(op="call_function", target=torch.ops.aten._local_scalar_dense.default)
    if any(isinstance(node.meta.get("val"), torch.SymFloat) for node in items):
        torch_private.tensorify_python_scalars(graph, mode.shape_env, mode)
        graph.recompile()


def multiply_in_pairs(graph: fx.GraphModule) -> None:
    """Splits each product of sizes into products of two factors, as Inductor requires; changes the graph in place.

    A trace records a new int, such as a stride `s0 ** 2 * s1`, as one node for each sympy expression.
    """
    for node in list(graph.graph.nodes):
        if node.target is torch_private.power:
            factors = [node.args[0]] * node.args[1]
        elif node.target is operator.mul and len(node.args) > 2:
            factors = list(node.args)
        else:
            continue
        with graph.graph.inserting_before(node):
            product = functools.reduce(_multiply, factors)
        node.replace_all_uses_with(product)


def _multiply(x: Any, y: Any) -> fx.Node:
    """Inserts a node that multiplies two nodes or ints."""
    graph = next(factor.graph for factor in (x, y) if isinstance(factor, fx.Node))
    node = graph.call_function(operator.mul, (x, y))
    node.meta["val"] = operator.mul(*(v.meta["val"] if isinstance(v, fx.Node) else v for v in (x, y)))
    return node


def find_extent(value: torch.SymInt, nodes: Iterable[fx.Node]) -> tuple[fx.Node, int] | None:
    """Returns the first node whose tensor has an extent, and the dimension; None if none has it."""
    for node in nodes:
        tensor = node.meta.get("val")
        for dim, extent in enumerate(tensor.shape if isinstance(tensor, Tensor) else ()):
            if isinstance(extent, torch.SymInt) and extent.node.expr == value.node.expr:
                return node, dim
    return None


def find_random_op(graph: fx.GraphModule) -> str | None:
    """Returns the name of the graph's first op that draws random numbers; None if there is none."""
    targets = (node.target for node in graph.graph.nodes)
    seeded = torch.Tag.nondeterministic_seeded
    return next((str(target) for target in targets if seeded in getattr(target, "tags", ())), None)


def autograd_nodes(results: Iterable[Any]) -> Iterator[Any]:
    """Yields each node of the autograd graph behind `results` once."""
    stack = [leaf.grad_fn for leaf in results if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    seen = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(parent for parent, _ in node.next_functions if parent is not None)


def tangent_slots(graph: fx.GraphModule) -> dict[str, int]:
    """Returns placeholder name -> tangent slot, for the tangents of a joint graph."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    names = (node.name for node in placeholders if "tangents" in str(node.target))
    return {name: slot for slot, name in enumerate(names)}


def tangent_dependencies(graph: fx.GraphModule, tangents: Mapping[str, int]) -> dict[fx.Node, frozenset[int]]:
    """Returns, for each node of a graph, the tangent slots that it depends on.

    Args:
        graph: The graph.
        tangents: Placeholder name -> tangent slot.
    """
    dependencies: dict[fx.Node, frozenset[int]] = {}
    for node in graph.graph.nodes:
        own = frozenset({tangents[node.name]} if node.name in tangents else ())
        dependencies[node] = own.union(*(dependencies[parent] for parent in node.all_input_nodes))
    return dependencies


# ------------------------------------------------------------------------------------------- storage offsets

# Compiled code gets the address of a tensor's first element, so it does not depend on the offset of that element in its
# storage. But a result of `storage_offset()`, and the `storage_offset` argument of `as_strided`, are constants of the
# trace. Whether memory can be viewed as a dtype of larger elements depends on the offset, too. If the function does one
# of these, the offsets of its inputs are part of the signature.

# Ops with an offset from the start of the storage -> the position of that argument.
_OPS = {
    torch.ops.aten.as_strided.default: 3,
    torch.ops.aten.as_strided_copy.default: 3,
    torch.ops.aten.as_strided_scatter.default: 4,
}


def depends_on_offsets(graph: fx.GraphModule) -> bool:
    """Returns whether a graph uses an offset in the storage of an input.

    A view of an input as a dtype of larger elements requires that its offset is a multiple of their size.
    """
    if input_storage_offsets(graph):
        return True
    storages = set(_input_storages(graph))
    return any(
        node.args[1].itemsize > node.args[0].meta["val"].dtype.itemsize
        and storage_key(node.args[0].meta["val"]) in storages
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.dtype)
    )


def _input_storages(graph: fx.GraphModule) -> dict[int, Any]:
    """Returns storage -> the offset of an input in it."""
    values = (node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder"))
    return {storage_key(value): value.storage_offset() for value in values if isinstance(value, Tensor)}


def input_storage_offsets(graph: fx.GraphModule) -> list[Any]:
    """Returns the storage offset of an input, for each op that uses an offset from the start of that input's storage.

    Inductor's code counts from the first element of an input. Its lowering of `as_strided` converts the offset. But the
    key of its graph cache has no offsets, so the cache may return code that was compiled for another offset.
    """
    starts = _input_storages(graph)
    nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_storage_offset.default)
    for target, position in _OPS.items():
        candidates = graph.graph.find_nodes(op="call_function", target=target)
        nodes += [
            node for node in candidates if len(node.args) > position and node.args[position] is not None
        ]
    storages = [storage_key(node.args[0].meta["val"]) for node in nodes]
    return [starts[storage] for storage in storages if storage in starts]
