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


@pytest.mark.slow
def test_the_first_call_alone_is_inductors(monkeypatch, pair):
    count, compiled = graphs_called(monkeypatch), desugar.compile(double)
    with torch.no_grad():
        for _ in range(3):
            result = compiled(pair)
    assert count == [1]
    torch.testing.assert_close(result.a, pair.a * 2)


@pytest.mark.slow
def test_forward_and_backward(monkeypatch, pair):
    count, compiled, x = graphs_called(monkeypatch), desugar.compile(lambda x: x.sin()), pair.requires_grad_()
    for _ in range(3):
        y = compiled(x)
        (grad,) = torch.autograd.grad(y, x, y.detach())
    assert count == [2]
    torch.testing.assert_close(grad.a, (x.a.sin() * x.a.cos()).detach())


def test_under_a_profiler_every_call_is_inductors(monkeypatch, pair):
    count, compiled = graphs_called(monkeypatch), desugar.compile(double)
    compiled(pair), compiled(pair)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        compiled(pair), compiled(pair)
    compiled(pair)
    assert count == [3]
    assert sum("Call CompiledFxGraph" in event.name for event in prof.events()) == 2


def test_graphs_of_torch_compile_are_called_by_inductors_own_call(monkeypatch, pair):
    count, compiled = graphs_called(monkeypatch), torch.compile(double, backend="desugar")
    for _ in range(3):
        compiled(pair)
    assert count == [3]


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
