"""Inductor's graphs: their own call the first time and under a profiler, the code inside them otherwise."""

from __future__ import annotations

import gc

import pytest
import torch
from torch._inductor.output_code import CompiledFxGraph
from torch.profiler import ProfilerActivity, profile

import desugar
from desugar.wrapper import direct_calls
from tests.desugar.classes import Pair


def double(x):
    return x * 2


@pytest.fixture
def pair():
    return Pair(torch.rand(2, 3), torch.rand(2, 3))


def graphs_called(monkeypatch):
    """How often Inductor's own call was made."""
    count, call = [0], CompiledFxGraph.__call__

    def counted(self, items):
        count[0] += 1
        return call(self, items)

    monkeypatch.setattr(CompiledFxGraph, "__call__", counted)
    return count


@pytest.mark.parametrize(
    ("door", "needs_grad", "expected"),
    [
        pytest.param(desugar.compile, False, 1, marks=pytest.mark.slow),
        pytest.param(desugar.compile, True, 2, marks=pytest.mark.slow),
        (lambda fn: torch.compile(fn, backend="desugar"), False, 3),
    ],
    ids=["the first call alone", "forward and backward", "torch.compile"],
)
def test_calls_that_are_inductors(monkeypatch, pair, door, needs_grad, expected):
    count, compiled, x = graphs_called(monkeypatch), door(torch.sin), pair.requires_grad_(needs_grad)
    for _ in range(3):
        y = compiled(x)
        torch.testing.assert_close(y.a, x.a.sin())
        if needs_grad:
            (grad,) = torch.autograd.grad(y, x, y.detach())
            torch.testing.assert_close(grad.a, (x.a.sin() * x.a.cos()).detach())
    assert count == [expected]


def test_under_a_profiler_every_call_is_inductors(monkeypatch, pair):
    count, compiled = graphs_called(monkeypatch), desugar.compile(double)
    compiled(pair), compiled(pair)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        compiled(pair), compiled(pair)
    compiled(pair)
    assert count == [3]
    assert sum("Call CompiledFxGraph" in event.name for event in prof.events()) == 2


@pytest.mark.slow
def test_a_graph_lives_as_long_as_its_wrapper(pair):
    compiled = desugar.compile(double)
    compiled(pair)
    scope = compiled.programs[0].run.__globals__
    gc.collect()
    whole, inside = direct_calls.graph_behind(scope, "compiled_graph")
    assert isinstance(whole, CompiledFxGraph)
    assert inside == whole.current_callable


def test_a_call_that_fails_leaves_the_next_one_to_inductor(monkeypatch, pair):
    compiled, calls = desugar.compile(double), []

    def failing(self, items):
        calls.append(items)
        raise RuntimeError("no")

    with monkeypatch.context() as patched:
        patched.setattr(CompiledFxGraph, "__call__", failing)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no"):
                compiled(pair)
    assert len(calls) == 2
    torch.testing.assert_close(compiled(pair).b, pair.b * 2)
