"""Checkpointed regions inside the function: marked in the graph, not traced twice."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import desugar
from tests.desugar.classes import Pair, make
from tests.desugar.judge import by_dynamo, by_pass, judge

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


# ---- selective -----------------------------------------------------------------------------------------------


def products(x, w):
    return (x @ w).sin().exp() @ w


def selective(policy):
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return lambda x, w: checkpoint(products, x, w, use_reentrant=False, context_fn=contexts).cos()


def keeping(op):
    save, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    return lambda ctx, func, *args, **kwargs: save if func is op else again


POLICIES = {
    "nothing": (keeping(None), 2, 0),
    "products": (keeping(aten.mm.default), 0, 2 * 4 * 3 * 4),
    "a list": ([aten.mm.default], 0, 2 * 4 * 3 * 4),
    "the sine": (keeping(aten.sin.default), 2, 4 * 3 * 4),
}


@pytest.mark.parametrize(("policy", "products_again", "saved"), POLICIES.values(), ids=POLICIES)
def test_a_policy_says_what_is_saved(policy, products_again, saved):
    fn = selective(policy)
    program = desugar.trace(fn, torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True))
    in_backward = [node.target for node in called(program.backward)].count(aten.mm.default)
    assert in_backward - 4 == products_again  # each product has two gradients
    assert program.saved_bytes == saved


@pytest.mark.sweep(2)
@pytest.mark.parametrize("cls", [torch.Tensor, Pair])
@pytest.mark.parametrize("policy", [policy for policy, _, _ in POLICIES.values()], ids=POLICIES)
def test_policies_inside(policy, cls):
    def arguments():
        x = torch.randn(3, 4, requires_grad=True) if cls is torch.Tensor else make(cls, 3, 4, grad=True)
        return x, torch.randn(4, 4, requires_grad=True)

    judge(selective(policy), arguments, calls=2)


def test_a_policy_outside():
    compiled = by_pass(products)
    contexts = functools.partial(create_selective_checkpoint_contexts, keeping(aten.mm.default))

    def around(function):
        return lambda x, w: checkpoint(function, x, w, use_reentrant=False, context_fn=contexts).cos()

    judge(
        around(products),
        lambda: (make(Pair, 3, 4, grad=True), torch.randn(4, 4, requires_grad=True)),
        around(compiled),
        calls=2,
    )


def test_random_numbers_under_a_policy_are_drawn_once():
    contexts = functools.partial(create_selective_checkpoint_contexts, keeping(aten.exp.default))
    fn = lambda x: checkpoint(block, x, use_reentrant=False, context_fn=contexts)  # noqa: E731
    judge(fn, lambda: (torch.randn(50, requires_grad=True),), calls=2)


def test_the_reentrant_kind():
    fn = lambda x: checkpoint(block, x, use_reentrant=True).cos()  # noqa: E731
    judge(fn, lambda: (torch.randn(4, requires_grad=True),), calls=2)


def test_the_reentrant_kind_outside():
    compiled = by_pass(torch.sin)
    judge(
        torch.sin,
        lambda: (torch.randn(4, requires_grad=True),),
        lambda x: checkpoint(compiled, x, use_reentrant=True),
    )


# ---- nested, and behind Dynamo -------------------------------------------------------------------------------


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
