"""Helpers of the GPU benchmarks: synchronized calls, and rows of times and counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.report import Row
from bench.timing import Timing, time_side_by_side

Call = Callable[[], Any]


def synced(call: Call, times: int = 1) -> Call:
    """Returns a function that makes `times` calls and then synchronizes with the GPU; runs it three times first."""

    def run() -> None:
        for _ in range(times):
            call()
        torch.cuda.synchronize()

    for _ in range(3):
        run()
    return run


def per_item(timing: Timing, count: int) -> Timing:
    """Divides a time by `count`."""
    return Timing(timing.median / count, timing.low / count, timing.high / count)


def time_rows(group: str, calls: dict[str, Call], rounds: int, first: str) -> list[Row]:
    """Times calls up to the end of their kernels, with ratios to the call `first`."""
    timings = time_side_by_side({name: synced(call) for name, call in calls.items()}, rounds=rounds)
    return [
        Row(group, name, t, {f"/ {first}": t.median / timings[first].median}, ours="desugar" in name)
        for name, t in timings.items()
    ]


def count_row(group: str, name: str, amount: int, unit: str, ratios: dict[str, float] | None = None) -> Row:
    """Returns the row of a count."""
    return Row(group, name, Timing(amount, amount, amount), ratios or {}, unit, ours="desugar" in name)
