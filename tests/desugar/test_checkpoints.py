"""Checkpointed regions inside the function: marked in the graph, not traced twice."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import desugar
from tests.desugar.classes import Pair, make
from tests.desugar.judge import by_dynamo, judge

aten = torch.ops.aten


def block(x):
    return F.dropout(x.sin(), 0.5).exp()


def two(x):
    y = checkpoint(block, x, use_reentrant=False) * 2
    return checkpoint(block, y, use_reentrant=False).cos()


def called(graph):
    return [node for node in graph.graph.nodes if node.op == "call_function"]


def test_each_region_is_in_the_graph_once():
    joint = desugar.trace(two, torch.randn(4, requires_grad=True)).joint
    targets = [node.target for node in called(joint)]
    assert targets.count(aten.exp.default) == targets.count(aten.native_dropout.default) == 2


def test_its_nodes_are_marked_but_for_random_ones():
    joint = desugar.trace(two, torch.randn(4, requires_grad=True)).joint
    marked = {node.target: node.meta.get("ac_graph_id") for node in called(joint) if "recompute" in node.meta}
    assert {aten.sin.default, aten.exp.default} <= set(marked)
    assert aten.native_dropout.default not in marked
    regions = [node.meta["ac_graph_id"] for node in called(joint) if node.target is aten.exp.default]
    assert regions[0] < regions[1]
    outside = [
        node for node in called(joint) if node.target is aten.cos.default and "recompute" not in node.meta
    ]
    assert outside  # the last op belongs to no region


def test_it_is_computed_again_in_the_backward():
    program = desugar.trace(
        lambda x: checkpoint(lambda x: x.sin().exp(), x, use_reentrant=False), make(Pair, 4, grad=True)
    )
    assert program.saved_bytes == 0
    assert aten.sin.default in [node.target for node in called(program.backward)]


def test_nested_regions():
    def inner(x):
        return checkpoint(lambda x: x.sin() * x, x, use_reentrant=False).exp()

    def fn(x):
        return checkpoint(inner, x, use_reentrant=False) * x

    judge(fn, lambda: (make(Pair, 4, grad=True),), calls=2)


def test_behind_dynamo():
    def fn(x):
        return checkpoint(lambda x: x.sin() * x, x, use_reentrant=False).exp()

    judge(fn, lambda: (make(Pair, 4, grad=True),), way=by_dynamo)


def test_hooks_are_as_before_after_a_trace():
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t)
    seen: list[torch.Tensor] = []
    x = torch.randn(4, requires_grad=True)
    desugar.trace(two, x)
    with hooks:
        x.sin()
    assert len(seen) == 1
