"""Benchmarks a declared class in eager mode; see `layers.py`."""

from __future__ import annotations

import pytest
import torch

from bench.layers import make_calls

CALLS = make_calls()


@pytest.mark.parametrize(("done", "subject"), CALLS, ids=str)
def test_eager(benchmark, done, subject):
    benchmark.group = done
    with torch.no_grad():
        benchmark(CALLS[done, subject])
