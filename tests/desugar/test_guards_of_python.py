"""Numbers, objects, modules and closures that a program depends on."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn

from tests.desugar.classes import Pair, TwoTensor, make
from tests.desugar.idioms.running import by_stock
from tests.desugar.judge import assert_same_values, by_pass, judge
from tests.desugar.programs import assert_programs

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


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("fn", "values"),
    [
        (lambda x, n: x * 2 if n == "a" else x + 1, ["a", "b"]),
        (lambda x, n: x.to(n), [torch.float64, torch.bfloat16]),
        (lambda x, n: (x * 2)[n] + 0, [slice(0, 2), slice(1, 2), 0]),
        (lambda x, n: x * 2 if n is None else x * n, [None, 3]),
        (lambda x, n: x * n[0], [["1"], ["2"], ("1",), ["1", "2"]]),
        (lambda x, n: n(x), [torch.sin, torch.cos]),
        (lambda x, n: x + torch.zeros(2, device=n)[0], [torch.device("cpu"), "cpu"]),
        (lambda x, n: x.reshape(n) * 2, [torch.Size([2, 2]), (2, 2), torch.Size([4, 1])]),
    ],
    ids=["str", "dtype", "slice", "None", "list", "function", "device", "Size"],
)
def test_other_constants(fn, values):
    fn = (lambda x, n: x * int(n[0])) if values[0] == ["1"] else fn
    assert_programs(fn, [lambda n=n: (make(Pair, 4), n) for n in values], len(values))


def test_equal_objects_of_an_unknown_type_are_told_apart():
    class Scale:
        def __init__(self, by):
            self.by = by

        def __eq__(self, other):
            return True

        __hash__ = None  # type: ignore[assignment]

    scales = [Scale(2), Scale(3)]
    assert_programs(lambda x, s: x * s.by, [lambda s=s: (make(Pair, 3), s) for s in scales], 2)


# ---- modules -------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(3, 3), nn.Dropout(0.5)
        self.weight = nn.Parameter(make(TwoTensor, 3))
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x):
        return self.drop(self.linear(x) * self.weight + self.shift)


def same(compiled, module, x):
    state = torch.get_rng_state()
    got = compiled(x)
    torch.set_rng_state(state)
    want = module(x)
    torch.testing.assert_close(got.a, want.a)
    torch.testing.assert_close(got.b, want.b)


def test_training_of_each_submodule():
    module, x = Net(), torch.randn(2, 3)
    compiled = by_pass(module)
    same(compiled, module, x)
    for change, count in (
        (lambda: compiled.eval(), 2),
        (lambda: module.train(), 2),
        (lambda: module.drop.eval(), 2),  # which is all that the function looks at
    ):
        change()
        same(compiled, module, x)
        assert len(compiled.programs) == count


def test_parameters_and_buffers_that_are_replaced():
    """A tensor of the same kind in the place of another one needs no program of its own."""
    module, x = Net().eval(), torch.randn(2, 3)
    compiled = by_pass(module)
    same(compiled, module, x)

    def in_place():
        with torch.no_grad():
            module.linear.weight.mul_(2)
            module.shift.add_(1)

    def load():
        module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True)

    changes = [
        (in_place, 1),
        (lambda: setattr(module.linear, "weight", nn.Parameter(torch.randn(3, 3))), 1),
        (lambda: setattr(module, "shift", torch.zeros(3)), 1),
        (load, 1),
        (lambda: setattr(module.linear, "bias", None), 2),
        (lambda: setattr(module, "shift", torch.zeros(3, dtype=torch.float64)), 3),
    ]
    for change, count in changes:
        change()
        same(compiled, module, x)
        assert len(compiled.programs) == count


# ---- closures ------------------------------------------------------------------------------------------------


def test_closure_cells():
    w, k, x = torch.ones(3, requires_grad=True), "2", make(TwoTensor, 2, 3)

    def fn(x):
        return x * w * int(k)

    compiled = by_pass(fn)
    same(compiled, fn, x)
    with torch.no_grad():
        w.add_(1)
    same(compiled, fn, x)
    assert len(compiled.programs) == 1
    k = "3"
    same(compiled, fn, x)
    w = torch.zeros(3)
    same(compiled, fn, x)
    assert len(compiled.programs) == 3
    w = make(TwoTensor, 3)
    same(compiled, fn, x)


@pytest.mark.parametrize("how", ["tuple", "dtype", "function", "partial", "held function"])
def test_whatever_a_cell_holds_is_seen(how):
    values = {"tuple": ((2.0,), (5.0,)), "dtype": (torch.float32, torch.float64)}.get(
        how, (torch.sin, torch.cos)
    )
    held = values[0]

    def inner(x):
        return x * held[0] if how == "tuple" else x.to(held) if how == "dtype" else held(x)

    fn = {"partial": functools.partial(inner), "held function": lambda x: inner(x)}.get(how, inner)
    compiled, x = by_pass(fn), torch.ones(3)
    for held in values:  # noqa: B007
        assert torch.equal(compiled(x), inner(x))


def test_requires_grad_of_a_tensor_from_outside():
    w = torch.ones(3, requires_grad=True)
    compiled = judge(lambda x: x * w, lambda: (torch.randn(2, 3),))
    w.requires_grad_(False)
    judge(lambda x: x * w, lambda: (torch.randn(2, 3),), compiled)
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


@pytest.mark.parametrize("before", [False, True])
def test_a_tensor_from_outside_that_is_the_argument(before):
    w = torch.ones(3, requires_grad=True)
    compiled = by_pass(lambda x: x * w)
    if before:
        compiled(torch.ones(3, requires_grad=True))
    (grad,) = torch.autograd.grad(compiled(w), w, torch.ones(3))
    assert grad.tolist() == [2, 2, 2]


def test_an_inner_tensor_of_a_wrapper_from_outside_that_is_the_argument():
    a = torch.ones(3)
    w = TwoTensor(a, a + 1)
    compiled = by_pass(lambda x: x * w)
    for x in (torch.ones(3), a, torch.ones(3)):
        assert torch.equal(compiled(x).b, x * w.b)
