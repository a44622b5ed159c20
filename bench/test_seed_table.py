"""Arguments of a backward that are no gradients: generated text beside the loop, alone and in the whole prologue."""

from __future__ import annotations

import pytest
import torch

from bench.seed import COUNTS, PUBLISHED, make_isolated, make_prologues
from bench.timing import time_side_by_side


@pytest.mark.parametrize("count", COUNTS)
def test_in_isolation(count):
    calls = make_isolated(count)
    timings = time_side_by_side(calls, rounds=40, round_ms=0.5)
    ratio = timings["isinstance loop"].low / timings["generated"].low
    print(f"{count}: {timings['isinstance loop']} µs → {timings['generated']} µs, {ratio:.1f} times")
    assert ratio >= PUBLISHED[count]


@pytest.mark.parametrize("count", COUNTS)
def test_in_place(count):
    calls = make_prologues(count)
    with torch.no_grad():
        timings = time_side_by_side(calls, rounds=40, round_ms=0.5)
    ratio = timings["installed PyTorch"].low / timings["generated"].low
    print(f"{count}: {timings['installed PyTorch']} µs → {timings['generated']} µs, {ratio:.1f} times")
    assert ratio >= 1
