"""Backwards for some of the gradients: nothing is left that only missing ones feed."""

from __future__ import annotations

import pytest
import torch

import desugar
from desugar.ir.fx_utils import output_nodes
from desugar.ir.stages import FromTangent
from desugar.passes.prune_tangents import prune_missing
from tests.desugar.classes import EVERY, Pair, Tensor, make, targets
from tests.desugar.judge import judge

aten = torch.ops.aten


def pruned(fn, missing, *args):
    """(the whole backward, what is left of it); `missing` are tangent slots."""
    program = desugar.trace(fn, *args)
    split = program.variants.partitioned
    placeholders = split.backward.graph.find_nodes(op="placeholder")
    sources = zip(placeholders, split.backward_inputs, strict=True)
    names = {n.name: source.index for n, source in sources if isinstance(source, FromTangent)}
    return split.backward, prune_missing(split.backward, names, missing, list(split.depends))


def computing(graph):
    """The ops, but for those that do nothing."""
    return [op for op in targets(graph) if op is not aten.detach.default]


def leaf(*size):
    return torch.randn(size, requires_grad=True)


ALL = [aten.cos.default, aten.mul.Tensor, aten.mul.Tensor, aten.add.Tensor]


@pytest.mark.parametrize(("missing", "ops"), [(set(), ALL), ({1}, ALL[:2]), ({0, 1}, [])], ids=str)
def test_ops_that_are_left_where_some_are_missing(missing, ops):
    whole, left = pruned(lambda x: (x.sin(), x.exp()), missing, leaf(3))
    assert sorted(map(str, computing(left))) == sorted(map(str, ops))
    assert (output_nodes(left) == [None]) == (not ops)
    assert len(computing(whole)) == 4 and output_nodes(whole) != [None], "it is not changed"


def test_what_saved_values_alone_feed_stays_if_it_is_needed():
    _, left = pruned(lambda x, y: (x * y, x.sin() * y.sin()), {0}, leaf(3), leaf(3))
    assert aten.add.Tensor not in targets(left) and targets(left).count(aten.mul.Tensor) == 4, str(left.graph)


def test_a_broadcast_zero_is_kept():
    """A sum that changes the size is no copy of its other half."""
    _, left = pruned(lambda x: (x.sum(), x * 2), {1}, leaf(3))
    (gradient,) = output_nodes(left)
    assert tuple(gradient.meta["val"].shape) == (3,)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("cls", [Tensor, *EVERY])
@pytest.mark.parametrize("missing", [0, 1])
def test_members_have_no_op_of_the_missing_result(cls, missing):
    compiled = judge(lambda x: (x.cos(), x.tanh()), lambda: (make(cls, 2, 6, grad=True),), missing=[missing])
    variants = compiled.programs[0].variants
    (text,) = variants.sources
    present = (missing == 1, missing == 0)
    assert f"def backward_{present[0]:d}{present[1]:d}(ctx" in text
    assert "zeros" not in text  # the missing gradient is not made up
    ops = targets(variants._graph(present))
    assert (aten.sin.default in ops, aten.tanh_backward.default in ops) == present
    assert list(variants.table) == [present]


def test_no_gradient_at_all():
    program = desugar.trace(lambda x: (x * 2, x * 3), make(Pair, 3, grad=True))
    backward = program.variants.table[False, False]
    assert backward(None, None, None) == (None, None, None)
    assert "compiled_graph" not in program.variants.sources[0]


# Two results; the size of `b` is an expression of that of `a`, and only the second result needs `a`.
shifted = lambda a, b: (b.sin(), (a + b[1:]).exp())  # noqa: E731


def marked(*sizes):
    tensors = list(map(leaf, sizes))
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensors


def test_a_symbol_in_the_size_of_an_input_stays_an_input():
    _, left = pruned(shifted, {1}, *marked(4, 5))
    inputs = [node.meta["val"] for node in left.graph.find_nodes(op="placeholder")]
    sizes = [n.node.expr for v in inputs if isinstance(v, Tensor) for n in v.shape if not isinstance(n, int)]
    ints = {v.node.expr for v in inputs if not isinstance(v, Tensor)}
    assert any(not n.is_symbol for n in sizes)
    assert set().union(*(n.free_symbols for n in sizes)) <= ints | set(sizes)


@pytest.mark.slow
def test_inductor_compiles_the_backward_of_one_result_for_sizes_that_are_expressions():
    fast = desugar.compile(shifted)
    for n in (4, 7, 3):
        a, b = marked(n, n + 1)
        fast(a, b)[0].sum().backward()
        torch.testing.assert_close(b.grad, b.detach().cos())
        assert a.grad is None
    assert len(fast.programs) == 1
