"""Goals for saved tensors in a backward: generated text against a loop, in isolation and in the whole prologue."""

from __future__ import annotations

import pytest
import torch

from bench.goals import COMPARED, PUBLISHED
from bench.seed import COUNTS, TABLES
from bench.timing import time_side_by_side


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("table", [name for name in COMPARED if name in TABLES])
def test_as_many_times_faster_as_published(table, count):
    calls = TABLES[table](count)
    with torch.no_grad():
        timings = time_side_by_side(calls, rounds=40, round_ms=0.5)
    (slow, slow_time), (_, generated) = timings.items()
    ratio = slow_time.low / generated.low
    print(f"{count}, {table}: {slow} {slow_time} µs → {generated} µs, {ratio:.1f} times")
    assert ratio >= PUBLISHED[count]
