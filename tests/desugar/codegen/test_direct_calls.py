"""Inductor's graphs: their own call the first time and under a profiler, the code inside them otherwise."""

import gc
from unittest import mock

import pytest
import torch
from torch._inductor.output_code import CompiledFxGraph
from torch.profiler import ProfilerActivity, profile

import desugar
from desugar.codegen import direct_calls
from tests.desugar.classes import Pair, make
from tests.desugar.judge import inside, judge


@pytest.fixture
def count(monkeypatch):
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
        pytest.param(inside, False, 3, marks=pytest.mark.slow),
    ],
    ids=["the first call alone", "forward and backward", "torch.compile"],
)
def test_calls_that_are_inductors(count, door, needs_grad, expected):
    judge(torch.sin, lambda: (make(Pair, 2, 3, grad=needs_grad),), way=door, calls=3)
    assert count == [expected]


def test_under_a_profiler_every_call_is_inductors(count):
    compiled, x = desugar.compile(lambda x: x * 2), make(Pair, 2, 3)
    compiled(x), compiled(x)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        compiled(x), compiled(x)
    compiled(x)
    assert count == [3]
    assert sum("Call CompiledFxGraph" in event.name for event in prof.events()) == 2


@pytest.mark.slow
def test_a_graph_lives_as_long_as_its_wrapper():
    compiled = desugar.compile(lambda x: x * 2)
    compiled(make(Pair, 2, 3))
    scope = compiled.programs[0].run.__globals__
    gc.collect()
    whole, code = direct_calls.graph_behind(scope, "compiled_graph")
    assert isinstance(whole, CompiledFxGraph) and code == whole.current_callable


def test_a_call_that_fails_leaves_the_next_one_to_inductor(monkeypatch):
    compiled, x = desugar.compile(lambda x: x * 2), make(Pair, 2, 3)
    failing = mock.Mock(side_effect=RuntimeError("no"))
    with monkeypatch.context() as patched:
        patched.setattr(CompiledFxGraph, "__call__", failing)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no"):
                compiled(x)
    assert failing.call_count == 2
    torch.testing.assert_close(compiled(x).b, x.b * 2)
