"""Graphs broken on purpose are caught, stage and node named; proved checks, turned on again, find what is wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import fx

from desugar.codegen.debug_checks import Expected, recheck
from desugar.flatten.inputs import Inputs
from desugar.ir.fx_utils import output_nodes, set_outputs
from desugar.ir.stages import FromForward, FromInput, FromTangent
from desugar.ir.values import Flat, unwrap_value
from desugar.passes.mutations import store_results
from desugar.passes.partition import min_cut, partition
from desugar.passes.verify import (
    RECHECK_VARIABLE,
    InvariantError,
    check_partitioned,
    check_pruned,
    check_stores,
    check_traced,
    rechecks_enabled,
)
from desugar.tracing.trace import discover, trace_graph
from tests.desugar.classes import EVERY, Pair, Tagged, make, plain_parts
from tests.desugar.judge import assert_programs, by_dynamo, by_pass, judge

aten = torch.ops.aten


@pytest.fixture
def staged() -> Any:
    """(traced, inputs) of a function with a backward."""
    inputs = Inputs()
    inputs.add_arguments([make(Pair, 2, 3, grad=True), torch.ones(3, requires_grad=True)])
    return traced_of(lambda leaves: ((leaves[0] * leaves[1]).sin(), leaves[0].sum()), inputs), inputs


def traced_of(call, inputs):
    return trace_graph(call, inputs, discover(call, inputs), {})


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


def hold(graph, change):
    """The first node, which holds something else now."""
    node = first_call(graph)
    node.meta["val"] = change(node.meta["val"])
    return node


def write(graph, op=aten.mul_.Tensor):
    node = first_call(graph)
    return insert(graph, node, op, node, node)


def call_a_module(graph):
    graph.add_submodule("relu", torch.nn.ReLU())
    return insert(graph, first_call(graph), "relu", op="call_module")


# Maps the broken property to a function that breaks it, and the message; `NODE` is the name of the broken node.
BROKEN = {
    "a subclass": (
        lambda graph: hold(graph, lambda val: make(Pair, 2, 3)),
        "after tracing: node NODE holds a Pair, not a plain tensor",
    ),
    "a real tensor": (
        lambda graph: hold(graph, lambda val: torch.ones(2, 3)),
        "holds a Tensor, not a plain tensor",
    ),
    "a subclass among several results": (
        lambda graph: hold(graph, lambda val: (val, make(Pair, 2, 3))),
        "holds a Pair",
    ),
    "another object": (lambda graph: hold(graph, lambda val: "text"), "holds a str"),
    **{
        str(op): (lambda graph, op=op: write(graph, op), rf"node NODE \({op}\) writes to its arguments")
        for op in (aten.add_.Tensor, aten.mul_.Tensor, aten.copy_.default)
    },
    "a call of a method": (
        lambda graph: insert(graph, first_call(graph), "relu", op="call_method"),
        "is a call_method",
    ),
    "a call of a module": (call_a_module, "is a call_module"),
    "a node used before it is made": (
        lambda graph: first_call(graph).update_arg(0, [*graph.graph.nodes][-2]),
        "used before it has been defined",
    ),
    "a constant result": (
        lambda graph: set_outputs(graph, [3, *output_nodes(graph)[1:]]),
        "the forward returns the constant 3",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_graph(name, traced):
    spoil, message = BROKEN[name]
    node = spoil(traced.graph)
    error = RuntimeError if "before it is made" in name else InvariantError
    with pytest.raises(error, match=message.replace("NODE", node.name if node else "")):
        check_traced(traced, 3)


@pytest.mark.parametrize("primals", [2, 4])
def test_another_number_of_inputs(traced, primals):
    with pytest.raises(InvariantError, match=f"takes 7 inputs, expected {primals + 4}"):
        check_traced(traced, primals)


# ---- partitioning --------------------------------------------------------------------------------------------


def take_a_gradient(split):
    graph = split.forward.graph
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.placeholder("tangents_9").meta["val"] = None


BROKEN_SPLITS = {
    # The last input of the backward comes from elsewhere.
    **{
        str(source): (
            lambda split, source=source: dataclasses.replace(
                split, backward_inputs=(*split.backward_inputs[:-1], source)
            ),
            "which does not exist",
        )
        for source in (FromInput(3), FromForward(99), FromTangent(4), FromInput(-1))
    },
    "a gradient too many": (
        lambda split: set_outputs(
            split.backward, [*output_nodes(split.backward), output_nodes(split.backward)[0]]
        ),
        "4 gradients, expected 3",
    ),
    "a forward that takes a gradient": (take_a_gradient, "the forward takes tangent tangents_9"),
    "a write in the forward": (
        lambda split: write(split.forward) and split,
        r"partitioning \(forward\).*writes",
    ),
    "a write in the backward": (
        lambda split: write(split.backward) and split,
        r"partitioning \(backward\).*writes",
    ),
}


@pytest.mark.parametrize("name", BROKEN_SPLITS)
def test_a_broken_split(name, split):
    partitioned, traced = split
    spoil, message = BROKEN_SPLITS[name]
    broken = spoil(partitioned) or partitioned
    with pytest.raises(InvariantError, match=message):
        check_partitioned(broken, traced, 3)


# ---- stores and pruned graphs --------------------------------------------------------------------------------


@pytest.fixture
def stored():
    """(graph, slots) of a function that writes to its first argument."""
    inputs = Inputs()
    inputs.add_arguments([torch.ones(2, 3), torch.ones(3)])
    traced = traced_of(lambda leaves: (leaves[0].mul_(2), leaves[0] * leaves[1])[1], inputs)
    stores = traced.outputs.store_positions
    store_results(traced.graph, stores)
    check_stores(traced.graph, stores)
    return traced.graph, stores


BROKEN_STORES = {
    "a read after the store": (
        lambda graph, store: insert(
            graph, store, aten.sin.default, graph.graph.find_nodes(op="placeholder")[0]
        ),
        r"storing.*reads .*_1, which is written already",
    ),
    "a store to another input": (
        lambda graph, store: store.update_arg(0, graph.graph.find_nodes(op="placeholder")[1]),
        r"storing.*writes to",
    ),
    "a store that is missing": (lambda graph, store: graph.graph.erase_node(store), "nothing is stored in"),
    "another write": (
        lambda graph, store: insert(graph, first_call(graph), aten.add_.Tensor, first_call(graph), 1),
        r"storing.*writes to its arguments",
    ),
}


@pytest.mark.parametrize("name", BROKEN_STORES)
def test_a_broken_store(name, stored):
    graph, slots = stored
    spoil, message = BROKEN_STORES[name]
    (store,) = graph.graph.find_nodes(op="call_function", target=aten.copy_.default)
    spoil(graph, store)
    with pytest.raises(InvariantError, match=message):
        check_stores(graph, slots)


def test_a_pruned_backward_that_takes_something_new(split):
    partitioned, _ = split
    names = [node.name for node in partitioned.backward.graph.find_nodes(op="placeholder")]
    check_pruned(partitioned.backward, names)
    with pytest.raises(InvariantError, match=r"pruning.*which the backward for all tangents did not"):
        check_pruned(partitioned.backward, names[1:])


# ---- the switch that turns every proved check on again --------------------------------------------------------------


@pytest.fixture
def rechecking(monkeypatch):
    monkeypatch.setenv(RECHECK_VARIABLE, "1")


def test_off_by_default():
    assert not rechecks_enabled()
    compiled = by_pass(lambda x: x * 2)
    compiled(make(Pair, 2))
    assert "recheck" not in compiled.programs[0].source


@pytest.mark.sweep(26)
@pytest.mark.parametrize("way", [by_pass, by_dynamo])
@pytest.mark.parametrize("cls", EVERY, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("grad", [False, True])
def test_silent(rechecking, cls, grad, way):
    compiled = judge(
        lambda x, y: ((x * y).sin(), x + 1),
        lambda: (make(cls, 3, 4, grad=grad), torch.randn(4)),
        way=way,
        calls=2,
    )
    assert way is not by_pass or "recheck(" in compiled.programs[0].source


@pytest.mark.sweep(14)
@pytest.mark.parametrize("cls", EVERY, ids=lambda cls: cls.__name__)
def test_silent_with_dynamic_sizes(rechecking, cls):
    calls = [lambda rows=rows: (make(cls, rows, 4, grad=True),) for rows in (2, 3, 4, 5)]
    assert_programs(lambda x: (x * 2).sin(), calls, 2)


@pytest.mark.slow
def test_silent_where_inductor_checks_no_sizes(rechecking):
    compiled = by_pass(lambda x: x * 2, backend="inductor", dynamic=False)
    for rows in (2, 1):
        for x in (make(Pair, rows, 4), make(Pair, 4, rows).t(), make(Pair, rows, 8)[:, ::2]):
            torch.testing.assert_close(plain_parts(compiled(x)), plain_parts(x * 2))


# ---- it can fire -------------------------------------------------------------------------------------------


def expected_of(leaf):
    flat = Flat()
    return Expected("things", (unwrap_value(leaf, flat),), dict(enumerate(flat.items)))


CHANGED = {
    "class": (make(Pair, 2, 3), make(Tagged, 2, 3), "type"),
    "metadata": (Tagged(torch.ones(2), torch.ones(2), "a"), Tagged(torch.ones(2), torch.ones(2), "b"), "metadata"),
    "size": (make(Pair, 2, 3), make(Pair, 3, 3), "size"),
    "stride": (torch.ones(2, 3), torch.ones(3, 2).t(), "stride"),
    "dtype": (torch.ones(2), torch.ones(2).double(), "dtype"),
    "dimensions": (torch.ones(2), torch.ones(2, 1), "dimensions"),
    "a wrapper inside": (
        Tagged(torch.ones(2), torch.ones(2)), Tagged(make(Pair, 2), torch.ones(2)), "a Pair, proved to be a plain",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_fires(name):
    traced, live, match = CHANGED[name]
    recheck([traced], expected_of(traced))
    with pytest.raises(InvariantError, match=match):
        recheck([live], expected_of(traced))


def test_a_constructor_that_cheats_is_caught(rechecking):
    """A class by hand whose instances change behind the wrapper's back."""
    compiled, x = by_pass(lambda x: x * 2), make(Pair, 3)
    compiled(x)
    compiled.programs[0].run.__globals__["compiled_graph"] = lambda items: (torch.ones(4), torch.ones(3))
    with pytest.raises(InvariantError, match="size of results"):
        compiled(x)


def test_a_float_among_the_results(rechecking):
    compiled = by_pass(lambda x: (x * 2, x.numel() / 2))
    assert [compiled(torch.ones(n))[1] for n in (3, 4, 5)] == [1.5, 2.0, 2.5]
