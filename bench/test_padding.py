"""Benchmarks widths that suit kernels against widths that do not; see `padding.py`."""

from __future__ import annotations

import itertools

import pytest
import torch

from bench.padding import OPS
from subclasses.ragged import kernel_multiple
from subclasses.ragged.padded.buckets import bucket_of

WIDTHS = [63, 65, 131]


@pytest.mark.parametrize(("op", "width", "wider"), list(itertools.product(OPS, WIDTHS, (False, True))))
def test_width(benchmark, op, width, wider):
    benchmark.group = f"{op}, {width} places"
    multiple = kernel_multiple(torch.float32)
    call = OPS[op](bucket_of(width, multiple) if wider else width, {"dtype": torch.float32, "device": "cpu"})
    with torch.no_grad():
        benchmark(call)
