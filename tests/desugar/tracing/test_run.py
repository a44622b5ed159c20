"""What is noted of one run of the function on functional tensors."""

from __future__ import annotations

import pytest
import torch

from desugar import _torch as private
from desugar.flatten.fakes import Fakes
from desugar.flatten.inputs import Inputs
from desugar.ir.values import Plain, Wrapper
from desugar.tracing.modes import tracing_modes
from desugar.tracing.run import assigned_inners, changed_slots, from_functional, identity
from desugar.tracing.trace import run_function
from tests.desugar.classes import Nested, Pair, TwoTensor, make
from tests.desugar.idioms.running import DOORS
from tests.desugar.judge import judge


def run(fn, *args, look):
    """Runs `fn` once as the pass does; `look(run)` is called under the trace's modes."""
    inputs = Inputs(Fakes())
    inputs.add_arguments(list(args))
    with tracing_modes(inputs.fakes.mode):
        found = run_function(lambda leaves: fn(*leaves), inputs, inputs.primals())
        return look(found)


def written(found):
    return [changed_slots(entered.value, found.items) for entered in found.input_leaves]


def test_what_was_written_is_named_by_slot():
    assert run(lambda x, y: x.add_(y), make(Pair, 3), make(Pair, 3), look=written) == [[0, 1], []]
    assert run(lambda x: x.b.add_(1), make(Pair, 3), look=written) == [[1]]
    assert run(lambda x: x.pair.b.add_(1), make(Nested, 3), look=written) == [[1]]
    assert run(lambda x: x[0].zero_(), torch.ones(2, 2), look=written) == [[0]]
    assert run(lambda x, y: x + y, make(TwoTensor, 3), torch.ones(3), look=written) == [[], []]


def test_pending_writes_are_carried_out():
    def look(found):
        return type(from_functional(found.items[0])), from_functional(7), found.items[0]._version

    assert run(lambda x: x.view(-1).add_(1), torch.ones(2, 2), look=look) == (private.FakeTensor, 7, 1)


def test_an_argument_with_a_history_is_entered_with_one():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True) * 2

    def look(found):
        return [(e.root is e.leaf, e.leaf.is_leaf, e.version) for e in found.input_leaves]

    assert run(lambda x, y: x * y, x, y, look=look) == [(True, True, 0), (False, False, 0)]


def test_the_same_argument_twice_is_one_object():
    x = make(Pair, 3)
    assert run(lambda x, y: x, x, x, look=lambda found: found.leaves[0] is found.leaves[1])


def test_inner_tensors_that_were_replaced():
    def fn(x):
        x.b = x.a * 2

    def look(found):
        return [assigned_inners(entered, found.items) for entered in found.input_leaves]

    assert run(fn, make(Pair, 3), look=look) == [["b"]]
    assert run(lambda x: x.b.add_(1), make(Pair, 3), look=look) == [[]]
    assert run(lambda x: x * 2, torch.ones(2), look=look) == [[]]


def transposes(x, y):
    y.unsqueeze_(0)
    x.t_()
    return (x * 2).t_() + y


def squeezes(x, y):
    x.squeeze_(0)
    x.mul_(2)
    return x + y


@pytest.mark.sweep(12)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("cls", [torch.Tensor, TwoTensor, Pair])
@pytest.mark.parametrize("fn", [transposes, squeezes])
def test_dynamo_breaks_graphs_at_changes_of_size_and_stride(fn, cls, grad, door):
    def args():
        x = make(cls, 1, 3, grad=grad)
        return (x * 1 if grad else x), make(cls, 3)

    judge(fn, args, DOORS[door](fn), calls=2)


def test_captured_tensors_come_after_the_arguments():
    w = make(TwoTensor, 3)

    def look(found):
        return [type(entered.value) for entered in found.input_leaves], len(found.items), len(found.versions)

    assert run(lambda x: x * w, torch.ones(3), look=look) == ([Plain, Wrapper], 3, 3)


def test_identity():
    """A functional tensor is its C++ half, whatever Python object is around it."""

    def look(found):
        item = found.items[0]
        again = private.FunctionalTensor(item.elem, private.detect_infra_mode(private.ModeKey.FUNCTIONAL))
        return identity(item) == identity(again), identity(item) == identity(item * 2)

    assert run(lambda x: x, torch.ones(2), look=look) == (True, False)
    number = 5
    assert identity(number) == id(number)
