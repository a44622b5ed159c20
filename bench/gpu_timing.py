"""What the GPU's measurements share: calls whose end is the end of their kernels, and times of one in a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.report import Row
from bench.timing import Timing, time_side_by_side

Call = Callable[[], Any]


def synced(call: Call, times: int = 1) -> Call:
    """`times` calls, then one wait for the GPU; already warm."""

    def run() -> None:
        for _ in range(times):
            call()
        torch.cuda.synchronize()

    for _ in range(3):
        run()
    return run


def per_item(timing: Timing, count: int) -> Timing:
    """The time of one, from that of `count`."""
    return Timing(timing.median / count, timing.low / count, timing.high / count)


def time_rows(group: str, calls: dict[str, Call], rounds: int, first: str) -> list[Row]:
    """Times calls up to the end of their kernels, as ratios to one of them."""
    timings = time_side_by_side({name: synced(call) for name, call in calls.items()}, rounds=rounds)
    return [
        Row(group, name, t, {f"/ {first}": t.median / timings[first].median}, ours="desugar" in name)
        for name, t in timings.items()
    ]


def count_row(group: str, name: str, amount: int, unit: str, ratios: dict[str, float] | None = None) -> Row:
    """A number that was counted, not timed."""
    return Row(group, name, Timing(amount, amount, amount), ratios or {}, unit, ours="desugar" in name)
