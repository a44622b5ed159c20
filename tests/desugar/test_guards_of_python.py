"""Numbers, objects, modules and closures that a program depends on."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.desugar.classes import Pair, TwoTensor, make
from tests.desugar.judge import assert_same_values, by_pass, judge
from tests.desugar.programs import assert_programs
from tests.desugar.test_models import Net
from tests.doors import by_stock

# ---- constants -----------------------------------------------------------------------------------------------

CONSTANTS = [1, True, 1.0, 2, 2.0, 1j, math.inf]


def test_constants_by_type_and_value():
    """Ints share a program from the third one on, and so do floats."""
    calls = [lambda n=n: (make(Pair, 3), n) for n in CONSTANTS]
    compiled = assert_programs(lambda x, n: x * n, calls, 6)
    for n in (5, 6, 3.5, 4.5):
        judge(lambda x, n: x * n, lambda n=n: (make(Pair, 3), n), compiled)
    assert len(compiled.programs) == 6


def test_nan_is_nan():
    fn = lambda x, n: torch.copysign(x, torch.tensor(n))  # noqa: E731
    assert_programs(fn, [lambda n=n: (torch.ones(3), n) for n in (math.nan, float("nan"))], 1)


def test_zeros_of_both_signs():
    """Dynamo compares floats by value, so that the first zero stands for the other one, too; from 2.15 on by bits."""
    second = -1 if torch.__version__ >= "2.15" else 1
    fn = lambda x, n: torch.copysign(x, torch.tensor(n))  # noqa: E731
    for door in (by_stock, by_pass):
        torch.compiler.reset()
        compiled = door(fn)
        assert [compiled(torch.ones(1), n).item() for n in (0.0, -0.0)] == [1, second]
    compiled = by_pass(fn, dynamic=True)
    assert [compiled(torch.ones(1), n).item() for n in (0.0, -0.0)] == [1, -1]


class Scale:
    """Equal to any other object."""

    def __init__(self, by):
        self.by = by

    def __eq__(self, other):
        return True

    __hash__ = None  # type: ignore[assignment]


OTHERS = {
    "str": (lambda x, n: x * 2 if n == "a" else x + 1, ["a", "b"]),
    "dtype": (lambda x, n: x.to(n), [torch.float64, torch.bfloat16]),
    "slice": (lambda x, n: (x * 2)[n] + 0, [slice(0, 2), slice(1, 2), 0]),
    "None": (lambda x, n: x * 2 if n is None else x * n, [None, 3]),
    "list": (lambda x, n: x * int(n[0]), [["1"], ["2"], ("1",), ["1", "2"]]),
    "function": (lambda x, n: n(x), [torch.sin, torch.cos]),
    "device": (lambda x, n: x + torch.zeros(2, device=n)[0], [torch.device("cpu"), "cpu"]),
    "Size": (lambda x, n: x.reshape(n) * 2, [torch.Size([2, 2]), (2, 2), torch.Size([4, 1])]),
    "equal objects of an unknown type": (lambda x, s: x * s.by, [Scale(2), Scale(3)]),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", OTHERS)
def test_other_constants(name):
    fn, values = OTHERS[name]
    assert_programs(fn, [lambda n=n: (make(Pair, 4), n) for n in values], len(values))


# ---- modules -------------------------------------------------------------------------------------------------


def same(compiled, fn, x, count=None):
    """A call is right, and so many programs are there then."""
    state = torch.get_rng_state()
    got = compiled(x)
    torch.set_rng_state(state)
    assert_same_values([got.detach()], [fn(x).detach()])
    assert count is None or len(compiled.programs) == count


def double_in_place(module):
    with torch.no_grad():
        module.linear.weight.mul_(2)
        module.shift.add_(1)


def load(module):
    module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True)


# Changes in order, each with how many programs there are then.
CHANGES = {
    "training of each submodule": [
        (lambda module: None, 1),
        (lambda module: module.eval(), 2),
        (lambda module: module.train(), 2),
        (lambda module: module.drop.eval(), 2),  # which is all that the function looks at
    ],
    # A tensor of the same kind in the place of another one needs no program of its own.
    "parameters and buffers": [
        (lambda module: module.eval(), 1),
        (double_in_place, 1),
        (lambda module: setattr(module.linear, "weight", nn.Parameter(torch.randn(6, 6))), 1),
        (lambda module: setattr(module, "shift", torch.zeros(6)), 1),
        (load, 1),
        (lambda module: setattr(module.linear, "bias", None), 2),
        (lambda module: setattr(module, "shift", torch.zeros(6, dtype=torch.float64)), 3),
    ],
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_a_module(name):
    module = Net()
    compiled = by_pass(module)
    for change, count in CHANGES[name]:
        change(module)
        same(compiled, module, torch.randn(2, 6), count)


# ---- closures ------------------------------------------------------------------------------------------------


def test_closure_cells():
    w, k, x = torch.ones(3, requires_grad=True), "2", make(TwoTensor, 2, 3)
    fn = lambda x: x * w * int(k)  # noqa: E731
    compiled = by_pass(fn)
    same(compiled, fn, x, 1)
    with torch.no_grad():
        w.add_(1)
    same(compiled, fn, x, 1)
    k = "3"
    same(compiled, fn, x, 2)
    w = torch.zeros(3)
    same(compiled, fn, x, 3)
    w = make(TwoTensor, 3)
    same(compiled, fn, x)


def test_requires_grad_of_a_tensor_from_outside():
    w, make_argument = torch.ones(3, requires_grad=True), lambda: (torch.randn(2, 3),)
    compiled = judge(lambda x: x * w, make_argument)
    w.requires_grad_(False)
    judge(lambda x: x * w, make_argument, compiled)
    assert len(compiled.programs) == 2


def test_a_plain_tensor_whose_gradient_is_a_wrapper():
    """Dynamo makes a fake of the gradient as well, and before 2.15 fails at one of another class."""
    w = torch.ones(3, requires_grad=True)
    w.grad = make(Pair, 3)
    for door in (by_stock, by_pass):
        torch.compiler.reset()
        if torch.__version__ >= "2.15":
            x = make(Pair, 3)
            assert_same_values([door(lambda x: x * w)(x)], [x * w])
            continue
        with pytest.raises(AssertionError, match="SubclassSymbolicContext"):
            door(lambda x: x * w)(make(Pair, 3))


@pytest.mark.parametrize("before", [[], [torch.ones(3, requires_grad=True)]])
def test_a_tensor_from_outside_that_is_the_argument(before):
    w = torch.ones(3, requires_grad=True)
    compiled = by_pass(lambda x: x * w)
    list(map(compiled, before))
    (grad,) = torch.autograd.grad(compiled(w), w, torch.ones(3))
    assert grad.tolist() == [2, 2, 2]


def test_an_inner_tensor_of_a_wrapper_from_outside_that_is_the_argument():
    a = torch.ones(3)
    w = TwoTensor(a, a + 1)
    compiled = by_pass(lambda x: x * w)
    for x in (torch.ones(3), a, torch.ones(3)):
        assert torch.equal(compiled(x).b, x * w.b)
