"""Graphs broken on purpose in every invariant: each is caught, with the stage and the node named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import fx

from desugar.flatten.fakes import Fakes
from desugar.flatten.inputs import Inputs
from desugar.ir.fx_utils import output_nodes, set_outputs
from desugar.ir.outputs import store_positions
from desugar.ir.stages import FromForward, FromInput, FromTangent
from desugar.passes.mutations import store_results
from desugar.passes.partition import min_cut, partition
from desugar.passes.verify import (
    InvariantError,
    check_partitioned,
    check_plain_graph,
    check_pruned,
    check_stores,
    check_traced,
)
from desugar.tracing.trace import discover, trace_graph
from tests.desugar.classes import Pair, make

aten = torch.ops.aten


@pytest.fixture
def staged() -> Any:
    """(traced, inputs) of a function with a backward."""

    def call(leaves):
        x, w = leaves
        return (x * w).sin(), x.sum()

    inputs = Inputs(Fakes())
    inputs.add_arguments([make(Pair, 2, 3, grad=True), torch.ones(3, requires_grad=True)])
    outputs = discover(call, inputs)
    return trace_graph(call, inputs, outputs, {}), inputs


@pytest.fixture
def traced(staged):
    check_traced(staged[0], 3)
    return staged[0]


@pytest.fixture
def split(staged):
    traced, inputs = staged
    partitioned = partition(traced, inputs.primals(), [], min_cut)
    check_partitioned(partitioned, traced, 3)
    return partitioned, traced


def first_call(graph: fx.GraphModule) -> fx.Node:
    return next(node for node in graph.graph.nodes if node.op == "call_function")


def insert(
    graph: fx.GraphModule, node: fx.Node, target: Any, *args: Any, op: str = "call_function"
) -> fx.Node:
    with graph.graph.inserting_after(node):
        new = graph.graph.create_node(op, target, args or (node,))
    new.meta = dict(node.meta)
    return new


# ---- one graph -----------------------------------------------------------------------------------------------


def test_a_subclass_in_the_graph(traced):
    node = first_call(traced.graph)
    node.meta["val"] = make(Pair, 2, 3)
    with pytest.raises(
        InvariantError, match=rf"after tracing: node {node.name} holds a Pair, not a plain tensor"
    ):
        check_traced(traced, 3)


def test_a_real_tensor_in_the_graph(traced):
    first_call(traced.graph).meta["val"] = torch.ones(2, 3)
    with pytest.raises(InvariantError, match="holds a Tensor, not a plain tensor"):
        check_traced(traced, 3)


def test_a_subclass_among_several_results(traced):
    node = first_call(traced.graph)
    node.meta["val"] = (node.meta["val"], make(Pair, 2, 3))
    with pytest.raises(InvariantError, match="holds a Pair"):
        check_traced(traced, 3)


def test_another_object_in_the_graph(traced):
    first_call(traced.graph).meta["val"] = "text"
    with pytest.raises(InvariantError, match="holds a str"):
        check_traced(traced, 3)


@pytest.mark.parametrize("op", [aten.add_.Tensor, aten.mul_.Tensor, aten.copy_.default])
def test_an_op_that_writes(traced, op):
    node = first_call(traced.graph)
    new = insert(traced.graph, node, op, node, node)
    with pytest.raises(InvariantError, match=rf"node {new.name} \({op}\) writes to its arguments"):
        check_traced(traced, 3)


@pytest.mark.parametrize("op", ["call_method", "call_module"])
def test_what_is_no_function(traced, op):
    graph = traced.graph
    if op == "call_module":
        graph.add_submodule("relu", torch.nn.ReLU())
    insert(graph, first_call(graph), "relu", op=op)
    with pytest.raises(InvariantError, match=f"is a {op}"):
        check_plain_graph(graph, "a stage")


def test_a_node_used_before_it_is_made(traced):
    nodes = [node for node in traced.graph.graph.nodes if node.op == "call_function"]
    nodes[0].args = (nodes[-1],)
    with pytest.raises(RuntimeError, match="used before it has been defined"):
        check_traced(traced, 3)


def test_asserts_are_no_writes():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(aten._assert_async.msg, (x, "message"))
    graph.output((x,))
    check_plain_graph(fx.GraphModule({}, graph), "a stage")


# ---- tracing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("primals", [2, 4])
def test_another_number_of_inputs(traced, primals):
    with pytest.raises(InvariantError, match=f"takes 7 inputs, expected {primals + 4}"):
        check_traced(traced, primals)


def test_a_constant_result(traced):
    outputs = output_nodes(traced.graph)
    set_outputs(traced.graph, [3, *outputs[1:]])
    with pytest.raises(InvariantError, match="the forward returns the constant 3"):
        check_traced(traced, 3)


# ---- partitioning --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [FromInput(3), FromForward(99), FromTangent(4), FromInput(-1)], ids=str)
def test_a_backward_input_that_does_not_exist(split, source):
    partitioned, traced = split
    broken = dataclasses.replace(partitioned, backward_inputs=(*partitioned.backward_inputs[:-1], source))
    with pytest.raises(InvariantError, match="which does not exist"):
        check_partitioned(broken, traced, 3)


def test_a_gradient_too_many(split):
    partitioned, traced = split
    outputs = output_nodes(partitioned.backward)
    set_outputs(partitioned.backward, [*outputs, outputs[0]])
    with pytest.raises(InvariantError, match="5 gradients, expected 4"):
        check_partitioned(partitioned, traced, 3)


def test_a_forward_that_takes_a_gradient(split):
    partitioned, traced = split
    graph = partitioned.forward.graph
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.placeholder("tangents_9").meta["val"] = None
    with pytest.raises(InvariantError, match="the forward takes tangent tangents_9"):
        check_partitioned(partitioned, traced, 3)


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_write_in_one_part(split, part):
    partitioned, traced = split
    graph = getattr(partitioned, part)
    node = first_call(graph)
    insert(graph, node, aten.mul_.Tensor, node, node)
    with pytest.raises(InvariantError, match=rf"partitioning \({part}\).*writes"):
        check_partitioned(partitioned, traced, 3)


def test_the_message_asks_for_a_report():
    assert "this is a bug in desugar; please report it" in str(InvariantError("x", "y"))
    assert issubclass(InvariantError, AssertionError)


# ---- stores and pruned graphs --------------------------------------------------------------------------------


@pytest.fixture
def stored():
    """(graph, slots) of a function that writes to its first argument."""
    inputs = Inputs(Fakes())
    inputs.add_arguments([torch.ones(2, 3), torch.ones(3)])

    def call(leaves):
        leaves[0].mul_(2)
        return leaves[0] * leaves[1]

    traced = trace_graph(call, inputs, discover(call, inputs), {})
    stores = store_positions(traced.outputs)
    store_results(traced.graph, stores)
    check_stores(traced.graph, stores)
    return traced.graph, stores


def last_store(graph):
    (node,) = graph.graph.find_nodes(op="call_function", target=aten.copy_.default)
    return node


def test_a_read_after_the_store(stored):
    graph, slots = stored
    insert(graph, last_store(graph), aten.sin.default, graph.graph.find_nodes(op="placeholder")[0])
    with pytest.raises(InvariantError, match=r"storing.*reads .*_1, which is written already"):
        check_stores(graph, slots)


def test_a_store_to_another_input(stored):
    graph, slots = stored
    node = last_store(graph)
    node.args = (graph.graph.find_nodes(op="placeholder")[1], node.args[1])
    with pytest.raises(InvariantError, match=r"storing.*writes to"):
        check_stores(graph, slots)


def test_a_store_that_is_missing(stored):
    graph, slots = stored
    graph.graph.erase_node(last_store(graph))
    with pytest.raises(InvariantError, match="nothing is stored in"):
        check_stores(graph, slots)


def test_another_write(stored):
    graph, slots = stored
    value = first_call(graph)
    insert(graph, value, aten.add_.Tensor, value, 1)
    with pytest.raises(InvariantError, match=r"storing.*writes to its arguments"):
        check_stores(graph, slots)


def test_a_pruned_backward_that_takes_something_new(split):
    partitioned, _ = split
    names = [node.name for node in partitioned.backward.graph.find_nodes(op="placeholder")]
    check_pruned(partitioned.backward, names)
    with pytest.raises(InvariantError, match=r"pruning.*which the whole one did not"):
        check_pruned(partitioned.backward, names[1:])
