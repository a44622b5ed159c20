"""Writes at the end of the forward graph: one store each; a saved value that is overwritten is copied first."""

from __future__ import annotations

import pytest
import torch

import desugar
from desugar.backends.choose import choose_backend
from desugar.dynamo.variants import Specialized
from desugar.ir.fx_utils import copy_graph, output_nodes
from desugar.ir.stages import FromForward, FromInput
from tests.desugar.classes import Nested, Pair, TwoTensor, make
from tests.desugar.judge import judge

aten = torch.ops.aten


def compiled_graph(fn, *args):
    """(program, the first graph that reached the compiler): the stores are put in after the kept graphs."""
    seen = []
    compiled = desugar.compile(fn, backend=keeping(seen))
    compiled(*args)
    return compiled.programs[0], seen[0]


def keeping(seen):
    """A backend that runs graphs as they are, and keeps them in a list."""
    return lambda graph, inputs: (seen.append(copy_graph(graph)), graph)[1]


def targets(graph):
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def stores(graph):
    return [node for node in graph.graph.nodes if node.target is aten.copy_.default]


def test_many_writes_are_one_store():
    def fn(x):
        x.add_(1)
        x.mul_(2)
        x[0].sin_()
        return x.sum()

    program, graph = compiled_graph(fn, make(TwoTensor, 2, 3))
    ops = targets(graph)
    assert len(stores(graph)) == 2  # one per inner tensor
    assert ops[-2:] == [aten.copy_.default] * 2  # after everything that reads
    assert not {aten.add_.Tensor, aten.mul_.Tensor, aten.sin_.default} & set(ops)
    assert not stores(program.joint)  # which stays functional
    assert targets(program.forward) == ops


def test_what_is_not_written_is_not_stored():
    _, graph = compiled_graph(lambda x, y: (x.add_(y), None)[1], make(Nested, 3), make(Nested, 3))
    placeholders = graph.graph.find_nodes(op="placeholder")
    assert [node.args[0] for node in stores(graph)] == placeholders[:3]
    assert output_nodes(graph) == [None] * 3  # a stored value is not returned as well


def overwritten(x, w):
    y = x.clone() * w
    x.zero_()
    return y


def test_a_saved_input_that_is_written_is_cloned():
    x, w = torch.randn(3), torch.randn(3, requires_grad=True)
    program, graph = compiled_graph(overwritten, x, w)
    split = program.variants.partitioned
    assert aten.clone.default in targets(graph)
    assert FromInput(0) not in split.backward_inputs
    assert any(isinstance(s, FromForward) and s.index >= split.num_forward for s in split.backward_inputs)


@pytest.mark.parametrize("cls", [torch.Tensor, TwoTensor, Pair])
@pytest.mark.parametrize(
    ("fn", "size"), [(overwritten, (3,)), (lambda x, w: (x.t().clone() @ w, x.zero_())[0], (2, 3))]
)
def test_gradients_where_a_saved_input_or_view_is_written(fn, size, cls):
    judge(fn, lambda: (make(cls, *size), make(cls, *size, grad=True)))


def overlapping():
    buffer = torch.arange(6.0)
    return buffer[:4], buffer[2:]


def add_to_the_first(x, y):
    x.add_(1)
    return y * 2


def test_overlapping_inputs_are_written_through_their_storage():
    graph, seen = torch.fx.symbolic_trace(add_to_the_first), []
    call = lambda leaves: (add_to_the_first(*leaves),)  # noqa: E731
    specialized = Specialized(call, choose_backend(keeping(seen)), "", graph, ("x", "y"))
    judge(add_to_the_first, overlapping, lambda x, y: specialized(x, y)[0])
    assert len(specialized.entries) == 1
    (store,) = stores(seen[0])
    assert tuple(store.meta["val"].shape) == (6,)
    judge(add_to_the_first, overlapping, calls=2)
