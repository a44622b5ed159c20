"""The joint graph split in two: where inputs of the backward come from, saved views, writes at the end."""

import functools

import pytest
import torch

import desugar
from desugar.backward.variants import prune_missing
from desugar.ir.abstract_values import hint
from desugar.ir.fx_utils import copy_graph, output_nodes
from desugar.ir.stages import FromForward, FromInput, FromTangent
from subclasses.ragged import JaggedTensor
from tests.desugar.classes import EVERY, Nested, Pair, Tensor, TwoTensor, make, targets
from tests.desugar.judge import judge


def split_of(fn, *args):
    program = desugar.trace(fn, *args)
    return program, program.spec.split


@pytest.mark.sweep(12)
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
    assert aten.t.default in targets(program.backward) or aten.permute.default in targets(program.backward)
    judge(fn, make_args)


def test_no_size_of_a_tangent_is_saved():
    """Only data determines the size of the result, and the backward reads it from the tangent."""
    judge(
        lambda x, w: torch.conv1d(x.mT, w, stride=2).mT.unflatten(-1, (2, 4)).flatten(-2),
        lambda: (
            JaggedTensor.from_tensors([torch.randn(n, 4) for n in (7, 3, 5)]).requires_grad_(),
            torch.randn(8, 4, 3),
        ),
    )


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
    assert [node.args[0] for node in stores(graph)] == graph.graph.find_nodes(op="placeholder")[:3]
    assert output_nodes(graph) == [None] * 3  # a stored value is not returned as well


def overwritten(x, w):
    y = x.clone() * w
    x.zero_()
    return y


def test_a_saved_input_that_is_written_is_cloned():
    x, w = torch.randn(3), torch.randn(3, requires_grad=True)
    program, graph = compiled_graph(overwritten, x, w)
    split = program.spec.split
    assert aten.clone.default in targets(graph)
    assert FromInput(0) not in split.backward_inputs
    assert any(isinstance(s, FromForward) and s.index >= split.num_forward for s in split.backward_inputs)


@pytest.mark.parametrize("cls", [torch.Tensor, TwoTensor, Pair])
@pytest.mark.parametrize(
    ("fn", "size"), [(overwritten, (3,)), (lambda x, w: (x.t().clone() @ w, x.zero_())[0], (2, 3))]
)
def test_gradients_where_a_saved_input_or_view_is_written(fn, size, cls):
    judge(fn, lambda: (make(cls, *size), make(cls, *size, grad=True)))


def test_overlapping_inputs_that_are_written():
    def overlapping():
        buffer = torch.arange(6.0)
        return buffer[:4], buffer[2:]

    judge(lambda x, y: (x.add_(1), y * 2)[1], overlapping, calls=2)


# ---- backwards for some of the gradients ----------------------------------------------------------------------------


def pruned(fn, missing, *args):
    """Returns the whole backward and the pruned backward; `missing` are tangent slots."""
    program = desugar.trace(fn, *args)
    split, backward = program.spec.split, program.backward
    sources = zip(backward.graph.find_nodes(op="placeholder"), split.backward_inputs, strict=True)
    names = {n.name: source.index for n, source in sources if isinstance(source, FromTangent)}
    return backward, prune_missing(backward, names, missing, list(split.depends))


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
    """A zero that broadcasts the other operand changes the size, so the sum is kept."""
    _, left = pruned(lambda x: (x.sum(), x * 2), {1}, leaf(3))
    (gradient,) = output_nodes(left)
    assert tuple(gradient.meta["val"].shape) == (3,)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("cls", [Tensor, *EVERY])
@pytest.mark.parametrize("missing", [0, 1])
def test_members_have_no_op_of_the_missing_result(cls, missing):
    compiled = judge(lambda x: (x.cos(), x.tanh()), lambda: (make(cls, 2, 6, grad=True),), missing=[missing])
    variants = compiled.programs[0].variants
    (text,) = variants.texts
    present = (missing == 1, missing == 0)
    assert f"def backward_{present[0]:d}{present[1]:d}(ctx" in text
    assert "zeros" not in text  # the missing gradient is not made up
    ops = targets(variants._graph(present))
    assert (aten.sin.default in ops, aten.tanh_backward.default in ops) == present
    assert list(variants.table) == [present]


def test_no_gradient_at_all():
    program = desugar.trace(lambda x: (x * 2, x * 3), make(Pair, 3, grad=True))
    assert program.variants.table[False, False](None, None, None) == (None, None, None)
    assert "compiled_graph" not in program.variants.texts[0]


# Two results; the size of `b` is an expression of the size of `a`, and only the second result needs `a`.
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


def test_parameters_and_buffers_are_static():
    """A compiler may rely on their addresses, and the partitioner saves them for nothing, as PyTorch's own do."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    inputs = desugar.trace(module, torch.randn(2, 3)).spec.inputs
    sizes = [tuple(item.shape) for slot, item in enumerate(inputs.items) if slot not in inputs.static]
    assert sizes == [(2, 3)] and len(inputs.static) == 2 + 5
