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


def test_a_chain_of_views():
    def fn(x, w):
        return x.view(4, 3)[1:].t() @ w

    args = torch.randn(12), torch.randn(3, 5, requires_grad=True)
    split = desugar.trace(fn, *args).variants.partitioned
    names = [node.name for node in split.backward.graph.find_nodes(op="placeholder")]
    assert FromInput(0) in split.backward_inputs and len(names) == len(split.backward_inputs)
    judge(fn, lambda: (torch.randn(12), torch.randn(3, 5, requires_grad=True)))


def test_a_view_of_a_result():
    def fn(x, w):
        y = x.exp()
        return y, y.t() @ w

    program = desugar.trace(fn, torch.randn(3, 2, requires_grad=True), torch.randn(3, 4, requires_grad=True))
    split = program.variants.partitioned
    assert len(output_nodes(program.forward)) == split.num_forward
    judge(fn, lambda: (torch.randn(3, 2, requires_grad=True), torch.randn(3, 4, requires_grad=True)))


def test_a_view_of_an_intermediate_is_saved_as_it_is():
    def fn(x, w):
        return (x.sin().t() @ w).exp()

    judge(fn, lambda: (torch.randn(3, 2, requires_grad=True), torch.randn(3, 4, requires_grad=True)))


@pytest.mark.parametrize("cls", [torch.Tensor, TwoTensor, Pair])
def test_a_write_to_the_owner_is_noticed(cls):
    x, w = make(cls, 3, 2), make(cls, 3, 4, grad=True)
    out = desugar.compile(matmul, backend="eager")(x, w)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(out)


def test_dynamic_sizes_of_the_view_come_along():
    def fn(x, w):
        return x.view(-1, w.shape[0]).t().sum(1) * w

    compiled = desugar.compile(fn, backend="eager", dynamic=True)
    for n in (4, 6, 9):
        judge(fn, lambda n=n: (torch.randn(2 * n), torch.randn(n, requires_grad=True)), compiled)
    assert len(compiled.programs) == 1
