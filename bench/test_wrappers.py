"""Benchmarks a wrapped argument: {plain, hand-written, declared} × {eager, stock, desugar} × modes × N."""

from __future__ import annotations

import pytest

from bench.subjects import SUBJECTS, Subject

# PyTorch's own hand-written class lacks a method that its cache calls.
pytestmark = pytest.mark.filterwarnings("ignore:TwoTensor does not implement _stable_hash_for_caching")


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: f"{s.mode}-{s.count}-{s.kind}-{s.way}")
def test_call(benchmark, subject: Subject):
    benchmark.group = f"{subject.mode}, N = {subject.count}"
    benchmark(subject.build())
