"""The floor does all that comes after the arguments were taken apart, and nothing else."""

from __future__ import annotations

import inspect

import pytest
import torch

from bench import floor


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["declared", "TwoTensor"])
def test_the_floor_checks_nothing_and_builds_all(kind):
    calls = floor.make_calls(2, kind)
    assert list(calls) == ["the graph", "the floor", "desugar.compile", floor.PLAIN]
    with torch.no_grad():
        graph, bottom, whole, plain = (call() for call in calls.values())
    assert len(graph) == len(plain) == 4 and [type(x) for x in bottom] == [type(x) for x in whole]
    text = inspect.getsource(calls["the floor"])
    assert text.count("make_wrapper_subclass(") == 2
    assert "if " not in text and "return [out0, out1]" in text
