"""Checkpointed regions inside the function: marked in the graph, not traced twice."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import desugar
from tests.desugar.classes import Pair, make, targets
from tests.desugar.judge import by_dynamo, by_pass, judge

aten = torch.ops.aten


def block(x):
    return F.dropout(x.sin(), 0.5).exp()


def two(x):
    y = checkpoint(block, x, use_reentrant=False) * 2
    return checkpoint(block, y, use_reentrant=False).cos()


def test_each_region_is_in_the_graph_once_and_marked_but_for_random_nodes():
    graph = desugar.trace(two, torch.randn(4, requires_grad=True)).joint
    assert targets(graph).count(aten.exp.default) == targets(graph).count(aten.native_dropout.default) == 2
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    marked = {node.target for node in nodes if "recompute" in node.meta}
    assert {aten.sin.default, aten.exp.default} <= marked and aten.native_dropout.default not in marked
    first, second = (node.meta["ac_graph_id"] for node in nodes if node.target is aten.exp.default)
    assert first < second
    assert any(n.target is aten.cos.default and "recompute" not in n.meta for n in nodes)  # the last op


def test_it_is_computed_again_in_the_backward():
    program = desugar.trace(
        lambda x: checkpoint(lambda x: x.sin().exp(), x, use_reentrant=False), make(Pair, 4, grad=True)
    )
    assert program.saved_bytes == 0 and aten.sin.default in targets(program.backward)


# ---- selective -----------------------------------------------------------------------------------------------


def products(x, w):
    return (x @ w).sin().exp() @ w


def checkpointed(fn, **options):
    return lambda *args: checkpoint(fn, *args, **{"use_reentrant": False} | options).cos()


def selecting(policy):
    return {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)}


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
    program = desugar.trace(checkpointed(products, **selecting(policy)), *of_products(torch.Tensor)())
    # each product has two gradients
    assert targets(program.backward).count(aten.mm.default) - 4 == products_again
    assert program.saved_bytes == saved


def one(size, cls=torch.Tensor):
    return lambda: (make(cls, size, grad=True),)


def of_products(cls=Pair):
    return lambda: (make(cls, 3, 4, grad=True), torch.randn(4, 4, requires_grad=True))


def outside(fn, make_args, **options):
    """A region around a call, in eager mode and of the compiled function."""
    return checkpointed(fn, **options), make_args, checkpointed(by_pass(fn), **options)


chained = lambda x: checkpointed(lambda x: x.sin() * x)(x).exp()  # noqa: E731
# Regions inside of the compiled function, with its way to compile, or outside of it.
JUDGED = {
    **{
        f"{name}, {cls.__name__}": lambda policy=policy, cls=cls: (
            checkpointed(products, **selecting(policy)),
            of_products(cls),
        )
        for name, (policy, _, _) in POLICIES.items()
        for cls in (torch.Tensor, Pair)
    },
    "random numbers under a policy are drawn once": lambda: (
        checkpointed(block, **selecting(keeping(aten.exp.default))),
        one(50),
    ),
    "the reentrant kind": lambda: (checkpointed(block, use_reentrant=True), one(4)),
    "nested": lambda: (
        checkpointed(lambda x: checkpointed(lambda x: x.sin() * x)(x).exp() * x),
        one(4, Pair),
    ),
    "behind Dynamo": lambda: (chained, one(4, Pair), by_dynamo(chained)),
    "outside": lambda: outside(products, of_products(), **selecting(keeping(aten.mm.default))),
    "outside, the reentrant kind": lambda: outside(torch.sin, one(4), use_reentrant=True),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", JUDGED)
def test_regions(name):
    judge(*JUDGED[name](), calls=2)


def test_hooks_are_as_before_after_a_trace():
    seen: list[torch.Tensor] = []
    x = torch.randn(4, requires_grad=True)
    desugar.trace(two, x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        x.sin()
    assert len(seen) == 1
