"""The joint graph split in two: where inputs of the backward come from, saved views, writes at the end."""

from __future__ import annotations

import functools

import pytest
import torch

import desugar
from desugar.backends.choose import choose_backend
from desugar.dynamo.variants import Specialized
from desugar.flatten.fakes import hint
from desugar.ir.fx_utils import copy_graph, output_nodes
from desugar.ir.stages import FromForward, FromInput, FromTangent
from tests.desugar.classes import EVERY, Nested, Pair, TwoTensor, make, targets
from tests.desugar.judge import judge


def split_of(fn, *args):
    program = desugar.trace(fn, *args)
    return program, program.variants.partitioned


@pytest.mark.sweep(6)
@pytest.mark.parametrize("cls", EVERY)
def test_both_halves_compute_what_the_joint_graph_does(cls):
    program, split = split_of(
        lambda x, w: ((x * w).sin(), x.sum()), make(cls, 2, 6, grad=True), torch.randn(6)
    )
    fakes = [n.meta["val"] for n in program.joint.graph.find_nodes(op="placeholder")]
    arguments = [torch.randn(f.shape) if isinstance(f, torch.Tensor) else hint(f) for f in fakes]
    primals = len(program.forward.graph.find_nodes(op="placeholder"))
    results = program.forward(*arguments[:primals])
    sources = {FromInput: arguments[:primals], FromForward: results, FromTangent: arguments[primals:]}
    gradients = program.backward(*(sources[type(s)][s.index] for s in split.backward_inputs))
    torch.testing.assert_close([*results[: split.num_forward], *gradients], [*program.joint(*arguments)])


def test_what_each_gradient_depends_on():
    _, split = split_of(lambda x, y: (x * 2, y * 3, x * y), *(make(TwoTensor, 2, grad=True) for _ in "xy"))
    assert [sorted(d) for d in split.depends] == [[0, 4], [1, 5], [2, 4], [3, 5]]


def saved_under(**knobs):
    with torch._functorch.config.patch(**knobs):
        fn = lambda x: functools.reduce(lambda x, _: (x @ x).sin().cos(), range(4), x)  # noqa: E731
        return desugar.trace(fn, make(Pair, 4, 4, grad=True)).saved_bytes


def test_the_partitioners_knobs_are_reachable():
    usual = saved_under()
    assert saved_under(activation_memory_budget=0.0) < usual
    assert saved_under(aggressive_recomputation=True) <= usual
    assert saved_under(ban_recompute_reductions=False) <= usual


# ---- saved views are made again from their owner -------------------------------------------------------------

aten = torch.ops.aten


@pytest.mark.parametrize("cls", [torch.Tensor, TwoTensor, Pair])
def test_the_backward_takes_the_owner_and_makes_the_view(cls):
    fn, make_args = lambda x, w: x.t() @ w, lambda: (make(cls, 3, 2), make(cls, 3, 4, grad=True))
    program, split = split_of(fn, *make_args())
    assert program.saved_bytes == 0
    assert len(output_nodes(program.forward)) == split.num_forward  # no view is saved
    assert FromInput(0) in split.backward_inputs
    assert aten.t.default in targets(split.backward) or aten.permute.default in targets(split.backward)
    judge(fn, make_args)


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
    judge(fn, lambda: (torch.randn(first, requires_grad=grad), torch.randn(second, requires_grad=True)))


# ---- writes at the end of the forward ------------------------------------------------------------------------


def compiled_graph(fn, *args):
    """(program, the first graph that reached the compiler): the stores are put in after the kept graphs."""
    seen = []
    compiled = desugar.compile(fn, backend=keeping(seen))
    compiled(*args)
    return compiled.programs[0], seen[0]


def keeping(seen):
    """A backend that runs graphs as they are, and keeps them in a list."""
    return lambda graph, inputs: (seen.append(copy_graph(graph)), graph)[1]


def stores(graph):
    return [node for node in graph.graph.nodes if node.target is aten.copy_.default]


def test_many_writes_are_one_store():
    program, graph = compiled_graph(
        lambda x: (x.add_(1), x.mul_(2), x[0].sin_(), x.sum())[3], make(TwoTensor, 2, 3)
    )
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


def test_overlapping_inputs_are_written_through_their_storage():
    def overlapping():
        buffer = torch.arange(6.0)
        return buffer[:4], buffer[2:]

    fn, seen = lambda x, y: (x.add_(1), y * 2)[1], []
    graph, backend = torch.fx.symbolic_trace(lambda x, y: y), choose_backend(keeping(seen))
    specialized = Specialized(lambda leaves: (fn(*leaves),), backend, "", graph, ("x", "y"))
    judge(fn, overlapping, lambda x, y: specialized(x, y)[0])
    assert len(specialized.entries) == 1
    (store,) = stores(seen[0])
    assert tuple(store.meta["val"].shape) == (6,)
    judge(fn, overlapping, calls=2)
