"""Names in the traces of torch.profiler, and nothing of it otherwise."""

from __future__ import annotations

import contextlib

import torch
from torch.profiler import ProfilerActivity, profile

import desugar


def double(x):
    return (x * 2).sum()


def names_of(run):
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        run()
    return [event.name for event in prof.events() if event.name.startswith("desugar")]


def test_calls_and_graphs_have_names():
    compiled, x = desugar.compile(double, backend="eager"), torch.ones(3)
    compiled(x)
    assert names_of(lambda: compiled(x)) == ["desugar: double", "desugar graph: double, forward"]
    assert (
        names_of(lambda: [compiled(x), compiled(x)])
        == [
            "desugar: double",
            "desugar graph: double, forward",
        ]
        * 2
    )


def test_backwards_have_names_once_they_have_run():
    compiled, x = desugar.compile(double, backend="eager"), torch.ones(3, requires_grad=True)
    compiled(x).backward()
    assert "desugar graph: double, backward" in names_of(lambda: compiled(x).backward())
    torch.testing.assert_close(x.grad, torch.full((3,), 4.0))


def test_a_call_that_compiles_or_fails_under_a_profiler():
    compiled = desugar.compile(double, backend="eager")
    assert names_of(lambda: compiled(torch.ones(2)))[0] == "desugar: double"
    failing = desugar.compile(lambda x: x @ torch.ones(7), backend="eager")

    def run():
        with contextlib.suppress(RuntimeError):
            failing(torch.ones(2))
        compiled(torch.ones(2))

    assert names_of(run).count("desugar: double") == 1


def test_results_under_a_profiler_are_those_without():
    compiled, x = desugar.compile(double, backend="eager"), torch.arange(3.0)
    want, got = compiled(x), []
    names_of(lambda: got.append(compiled(x)))
    torch.testing.assert_close(got[0], want)
    torch.testing.assert_close(compiled(x), want)


def test_without_a_profiler_graphs_keep_no_names():
    compiled, x = desugar.compile(double, backend="eager"), torch.ones(3)
    compiled(x)
    run = compiled.programs[0].run
    assert run.__globals__["compiled_graph"].__qualname__.startswith("run_as_is")
