"""Saved views are made again in the backward from their owner."""

from __future__ import annotations

import pytest
import torch

import desugar
from desugar.ir.fx_utils import output_nodes
from desugar.ir.stages import FromInput
from tests.desugar.classes import Pair, TwoTensor, make
from tests.desugar.judge import backward, judge

aten = torch.ops.aten


def targets(graph):
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def matmul(x, w):
    return x.t() @ w


@pytest.mark.parametrize("cls", [torch.Tensor, TwoTensor, Pair])
def test_the_backward_takes_the_owner_and_makes_the_view(cls):
    args = make(cls, 3, 2), make(cls, 3, 4, grad=True)
    program = desugar.trace(matmul, *args)
    split = program.variants.partitioned
    assert program.saved_bytes == 0
    assert len(output_nodes(program.forward)) == split.num_forward  # no view is saved
    assert FromInput(0) in split.backward_inputs
    assert aten.t.default in targets(split.backward) or aten.permute.default in targets(split.backward)
    judge(matmul, lambda: (make(cls, 3, 2), make(cls, 3, 4, grad=True)))


def leaf(*size):
    return torch.randn(size, requires_grad=True)


# Functions, and the sizes of their arguments.
VIEWS = {
    "a chain": (lambda x, w: x.view(4, 3)[1:].t() @ w, (12,), (3, 5)),
    "of a result": (lambda x, w: (lambda y: (y, y.t() @ w))(x.exp()), (3, 2), (3, 4)),
    "of an intermediate": (lambda x, w: (x.sin().t() @ w).exp(), (3, 2), (3, 4)),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("grad", [False, True])
def test_gradients_where_a_view_is_saved(name, grad):
    fn, first, second = VIEWS[name]
    judge(fn, lambda: (torch.randn(first, requires_grad=grad), leaf(*second)))


@pytest.mark.parametrize("cls", [torch.Tensor, TwoTensor, Pair])
def test_a_write_to_the_owner_is_noticed(cls):
    x, w = make(cls, 3, 2), make(cls, 3, 4, grad=True)
    out = desugar.compile(matmul, backend="eager")(x, w)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(out)


def test_dynamic_sizes_of_the_view_come_along():
    fn = lambda x, w: x.view(-1, w.shape[0]).t().sum(1) * w  # noqa: E731
    compiled = desugar.compile(fn, backend="eager", dynamic=True)
    for n in (4, 6, 9):
        judge(fn, lambda n=n: (torch.randn(2 * n), torch.randn(n, requires_grad=True)), compiled)
    assert len(compiled.programs) == 1
