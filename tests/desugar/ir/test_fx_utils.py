"""Small operations on graphs, and results that a compiler's passes have made one."""

from __future__ import annotations

import pytest
import torch

import desugar
from desugar import _torch as private
from desugar.ir.fx_utils import (
    Results,
    clone_aliased_results,
    output_nodes,
    set_outputs,
)
from tests.desugar.classes import Pair, make, plain_parts

aten = torch.ops.aten


def traced(fn, *sizes):
    with private.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(torch.ones(size)) for size in sizes]
        return private.make_fx(fn)(*fakes)


def targets(graph):
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def test_results_that_became_one_are_copied_apart():
    graph = traced(lambda x, y: (x + y, x * y, x.sin()), (2,), (2,))
    before = Results.of(graph, 3)
    x, _ = graph.graph.find_nodes(op="placeholder")
    total = output_nodes(graph)[0]
    set_outputs(graph, [total, total, x])  # as passes do: two equal values, and an identity
    clone_aliased_results(graph, before)
    a, b, c = graph((t := torch.ones(2)), torch.ones(2))
    assert len({a.data_ptr(), b.data_ptr(), c.data_ptr(), t.data_ptr()}) == 4
    assert targets(graph).count(aten.clone.default) == 2


def test_results_that_always_were_one_stay_so():
    graph = traced(lambda x, y: (x, x + y, y), (2,), (2,))
    total = output_nodes(graph)[1]
    set_outputs(graph, [*output_nodes(graph), total, None])
    clone_aliased_results(graph, Results.of(graph, 5))
    assert aten.clone.default not in targets(graph)


def test_a_view_that_became_its_input_shares_its_memory():
    graph = traced(lambda x: (x.view(2), x + 0), (2,))
    before = Results.of(graph, 2)
    (x,) = graph.graph.find_nodes(op="placeholder")
    set_outputs(graph, [x, x])
    clone_aliased_results(graph, before)
    view, total = graph(t := torch.ones(2))
    assert view.data_ptr() == t.data_ptr() != total.data_ptr()


@pytest.mark.slow
@pytest.mark.parametrize("grad", [False, True])
def test_inductor_gives_no_argument_for_a_result(grad):
    """`x + 0` is `x` after Inductor's passes; eager gives a new tensor."""
    compiled = desugar.compile(lambda x: (torch.zeros(3, 4) + x, x * 1))
    x = make(Pair, 3, 4, grad=grad)
    kept = [part.clone() for part in plain_parts(x)]
    with torch.no_grad():
        outs = compiled(x)
        for out in outs:
            for part in plain_parts(out):
                part.add_(1)
    for part, old in zip(plain_parts(x), kept, strict=True):
        torch.testing.assert_close(part, old)
    storages = {part.untyped_storage().data_ptr() for t in (x, *outs) for part in plain_parts(t)}
    assert len(storages) == 6
