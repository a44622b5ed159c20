"""Which tensors share memory, and results that a compiler's passes have made one."""

import pytest
import torch
from hypothesis import given, strategies as st

import desugar
from desugar import _torch as torch_private
from desugar.ir.fx_utils import (
    Results,
    clone_aliased_results,
    output_nodes,
    set_outputs,
)
from desugar.ir.storage import are_apart, base_of, may_overlap
from subclasses._torch import storage_key
from tests.desugar.classes import Pair, make, targets
from tests.desugar.judge import judge
from tests.tables import giving


@given(st.data())
def test_ranges(data):
    """Never apart where two tensors have a byte in common."""
    buffer = torch.zeros(24)

    def part():
        rows, cols = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
        strides = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 2))
        return buffer.as_strided((rows, cols), strides, data.draw(st.integers(0, 8)))

    one, other = part(), part()
    places = torch.arange(24.0)
    seen = [
        {*places.as_strided(t.size(), t.stride(), t.storage_offset()).flatten().tolist()}
        for t in (one, other)
    ]
    assert may_overlap(one, other) == may_overlap(other, one)
    assert may_overlap(one, other) or not seen[0] & seen[1]


BUFFER, DOUBLES, X = torch.zeros(8), torch.zeros(4, dtype=torch.float64), torch.ones(4)
HALVES, W = DOUBLES.view(torch.float32), make(Pair, 2, 3)


test_what_shares_memory = giving(
    {
        "side by side": (lambda: may_overlap(BUFFER[:4], BUFFER[4:]), False),
        "in between, by ranges": (lambda: may_overlap(BUFFER[::2], BUFFER[1::2]), True),
        "elsewhere": (lambda: may_overlap(BUFFER, BUFFER.clone()), False),
        "empty": (lambda: may_overlap(BUFFER[:0], BUFFER), False),
        "as another dtype": (lambda: may_overlap(BUFFER, BUFFER.view(torch.int32)[3:4]), True),
        # Offsets are in elements of each tensor's own size.
        "larger elements": (lambda: may_overlap(DOUBLES[2:3], HALVES[4:5]), True),
        "larger elements, apart": (lambda: may_overlap(DOUBLES[1:2], HALVES[4:5]), False),
        "written, and others": (lambda: are_apart((X,), (BUFFER,)), True),
        "written, overlapping": (lambda: are_apart((X[:2],), (X[1:],)), False),
        "written, side by side": (lambda: are_apart((X[:2],), (X[2:],)), True),
        "both written": (lambda: are_apart((X[:2], X[1:]), ()), False),
        "views of views": (
            lambda: [base_of(y) is X for y in (X, X[:2], X[:2][1:], X.detach())],
            [True] * 3 + [False],
        ),
        "a detached tensor": (lambda: storage_key(X.detach()) == storage_key(X), True),
        "a view of a wrapper": (
            lambda: [storage_key(y) == storage_key(W) for y in (W.view(-1), W.clone())],
            [True, False],
        ),
        "both read, which does no harm": (lambda: are_apart((), (X[1:], X)), True),
    }
)


# ---- small operations on graphs ------------------------------------------------------------------------------

aten = torch.ops.aten


def traced(fn, *sizes):
    with torch_private.FakeTensorMode() as mode:
        return torch_private.make_fx(fn)(*(mode.from_tensor(torch.ones(size)) for size in sizes))


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
    set_outputs(graph, [*output_nodes(graph), output_nodes(graph)[1], None])
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
    judge(
        lambda x: (torch.zeros(3, 4) + x, x * 1),
        lambda: (make(Pair, 3, 4, grad=grad),),
        way=desugar.compile,
        around=torch.no_grad,
    )
