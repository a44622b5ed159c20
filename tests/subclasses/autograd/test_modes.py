"""Training under dispatch modes, which see each op below autograd and call it again: counters of FLOPs, logs.

`desugar.explain` records ops with one, too, and has to show the program that runs.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import desugar
from subclasses import TensorSubclass, inner
from tests.subclasses.subjects import MODES

aten = torch.ops.aten


class Logging(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


class Masked(TensorSubclass, fallback="views"):
    """Its rules compute something else than the ops, which tells their derivatives from PyTorch's."""

    numbers: Tensor = inner()
    known: Tensor = inner(dtype=torch.bool)


@Masked.implements(aten.mul.Tensor)
def _(func, x, y):
    return Masked(x.numbers * y * y, x.known)


@Masked.implements(aten.mul_.Tensor)
def _(func, x, y):
    x.numbers.mul_(y).mul_(y)
    return x


@Masked.implements(aten.copy_)
def _(func, x, y, non_blocking=False):
    numbers, known = (y.numbers, y.known) if isinstance(y, Masked) else (y, torch.ones_like(x.known))
    x.numbers.copy_(numbers)
    x.known.copy_(known)
    return x


@Masked.implements(aten.mm)
def _(func, x, y):
    return Masked((x.numbers @ y.numbers).exp(), x.known)


@Masked.implements(aten.add.Tensor)
def _(func, x, y):
    return Masked(x.numbers * y.numbers, x.known & y.known)


def copied(x, y):
    x.copy_(y)
    return x


class GradientOfOnes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return Masked(x.numbers.clone(), x.known)

    @staticmethod
    def backward(ctx, cotangent):
        return Masked(torch.full((2, 2), 5.0), cotangent.known)


FUNCTIONS = {
    "product": lambda x, y: x * y,
    "in place": lambda x, y: x.mul_(y),
    "copied": copied,
    "view": lambda x, y: x[0].mul_(y[0]),
    "several ops": lambda x, y: torch.matrix_power(x, 3),
}


def leaves():
    return torch.full((2, 2), 0.5, requires_grad=True), torch.full((2, 2), 3.0, requires_grad=True)


def gradients(function, mode):
    a, y = leaves()
    x = Masked(a * 1, torch.tensor([[True, False], [False, True]]))
    with mode:
        out = function(x, y)
        found = torch.autograd.grad(out.unwrap("numbers").sum(), (a, y), allow_unused=True)
    return out.unwrap("numbers"), out.known, *found


@pytest.mark.parametrize("mode", [Logging, lambda: FlopCounterMode(display=False)], ids=["log", "flops"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_derivatives_are_those_of_the_rules(name, mode):
    expected = gradients(FUNCTIONS[name], contextlib.nullcontext())
    torch.testing.assert_close(gradients(FUNCTIONS[name], mode()), expected)


def test_a_mode_sees_the_ops():
    with Logging() as log:
        gradients(FUNCTIONS["in place"], contextlib.nullcontext())
    assert "aten.mul_.Tensor" in log.ops


def test_gradients_are_added_by_inner_tensors():
    """Also where the class says what a sum of values is."""

    def total(x, y):
        return sum(t for y in (GradientOfOnes.apply(x), GradientOfOnes.apply(x)) for t in y.unwrap()[:1])

    for mode in (contextlib.nullcontext(), Logging()):
        a, _ = leaves()
        with mode:
            total(Masked(a, torch.ones(2, 2, dtype=torch.bool)), None).sum().backward()
        assert a.grad.tolist() == [[10.0, 10.0], [10.0, 10.0]]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", ["in place", "copied", "view"])
def test_explain_shows_the_program_that_runs(name):
    a, y = leaves()
    x = Masked(a * 1, torch.tensor([[True, False], [False, True]]))
    shown = desugar.explain(FUNCTIONS[name], x, y).program
    graph = next(g for g in shown.graphs if "backward" in g.name)
    backward = desugar.trace(FUNCTIONS[name], x, y).backward
    ops = [n.target.__name__ for n in backward.graph.nodes if n.op == "call_function"]
    assert graph.text.count("torch.ops.") == len(ops)
    assert all(op in graph.text for op in ops)


@pytest.mark.parametrize("door", [door for door in MODES if door != "stock"])
def test_what_is_overwritten_gets_zeros(door):
    a, y = leaves()
    x = Masked(a * 1, torch.tensor([[True, False], [False, True]]))
    out = MODES[door](copied)(x, y)
    found = torch.autograd.grad(out.unwrap("numbers").sum(), (a, y), allow_unused=True)
    assert torch.equal(found[0], torch.zeros(2, 2))
    torch.testing.assert_close(found[1], torch.ones(2, 2))
    assert bool(out.known.all())
