"""Names in the traces of torch.profiler, and nothing of it otherwise."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.doors import by_desugar, by_torch


def double(x):
    return (x * 2).sum()


def names_of(run):
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        run()
    return [event.name for event in prof.events() if event.name.startswith("desugar")]


DOORS = pytest.mark.parametrize("door", [by_desugar, by_torch])


@DOORS
def test_calls_and_graphs_have_names(door):
    compiled, x = door(double), torch.ones(3)
    compiled(x)
    names = ["desugar: double", "desugar graph: double, forward"]
    assert names_of(lambda: [compiled(x), compiled(x)]) == names * 2


@DOORS
def test_backwards_have_names_once_they_have_run(door):
    compiled, x = door(double), torch.ones(3, requires_grad=True)
    compiled(x).backward()
    assert "desugar graph: double, backward" in names_of(lambda: compiled(x).backward())
    torch.testing.assert_close(x.grad, torch.full((3,), 4.0))


@DOORS
def test_a_call_that_compiles_or_fails_under_a_profiler(door):
    compiled, failing = door(double), door(lambda x: x @ torch.ones(7))
    assert names_of(lambda: compiled(torch.ones(2)))[0] == "desugar: double"

    def run():
        with contextlib.suppress(RuntimeError):
            failing(torch.ones(2))
        compiled(torch.ones(2))

    assert names_of(run).count("desugar: double") == 1


class Twice(torch.nn.Module):
    def forward(self, x):
        return x * 2


def breaks(x):
    y = x * 2
    torch._dynamo.graph_break()
    return y + 1


def test_modules_and_functions_that_break():
    module, broken, x = by_desugar(Twice()), by_desugar(breaks), torch.ones(3)
    module(x), broken(x)
    assert names_of(lambda: module(x)) == ["desugar: Twice", "desugar graph: Twice, forward"]
    assert names_of(lambda: broken(x)) == ["desugar: breaks", *["desugar graph: breaks, forward"] * 2]


def test_without_a_profiler_graphs_keep_no_names():
    compiled = by_desugar(double)
    compiled(torch.ones(3))
    run = compiled.programs[0].run
    assert run.__globals__["compiled_graph"].__qualname__.startswith("run_eagerly")
