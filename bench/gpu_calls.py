"""Measures the CPU time of calls whose kernels run on a GPU, and counts CUDA runtime calls of a training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch.profiler import ProfilerActivity, profile

import desugar
from bench.gpu_timing import Call, count_row, per_item, synced, time_rows
from bench.report import Row
from bench.subjects import KINDS, MODES, Subject, copy_function, double
from bench.timing import time_side_by_side

# ---------------------------------------------------------------------------------------------------------
# overhead
# ---------------------------------------------------------------------------------------------------------

BURST = 50  # calls between two synchronizations: the CPU continues while all but the last kernels run
STOCK, DIRECT = "torch.compile", "desugar.compile"


def measure_overhead(rounds: int, counts: Sequence[int] = (1, 5, 20), device: str = "cuda") -> list[Row]:
    """Times calls on tensors so small that a kernel launch takes longer than the kernel; calls do not synchronize."""
    rows = []
    for mode in MODES:
        for count in counts:
            torch.compiler.reset()
            subjects = [Subject(mode, count, kind, way, device) for kind in KINDS for way in (STOCK, DIRECT)]
            calls = {(s.kind, s.way): synced(s.build(), BURST) for s in subjects}
            timings = time_side_by_side(calls, rounds=rounds)
            for (kind, way), t in timings.items():
                ratios = {
                    f"/ {name}, plain": t.median / timings["plain", of].median
                    for name, of in (("same way", way), (STOCK, STOCK))
                }
                name = f"{kind}, {way}"
                rows.append(Row(f"{mode}, N = {count}", name, per_item(t, BURST), ratios, ours=way == DIRECT))
    return rows


# ---------------------------------------------------------------------------------------------------------
# events
# ---------------------------------------------------------------------------------------------------------

CALLS = "calls"  # a row's unit
EVENTS = (
    "cudaEventRecord",
    "cudaEventRecordWithFlags",
    "cudaStreamWaitEvent",
    "cudaEventSynchronize",
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
)


def measure_events(rounds: int, count: int = 20, device: str = "cuda") -> list[Row]:
    """Times one training step, and counts its calls of the CUDA runtime."""
    calls = {}
    for kind in ("plain", "declared"):
        pairs = [torch.rand(2, 8, 8, device=device).unbind() for _ in range(count)]
        args = [x.detach().requires_grad_() for a, b in pairs for x in KINDS[kind](a, b)]
        tangents = [x.detach().clone() for x in args]
        fn = desugar.compile(copy_function(double))
        calls[f"{kind}, {DIRECT}"] = lambda f=fn, a=args, t=tangents: torch.autograd.grad(f(*a), a, t)
    rows = time_rows(f"training, N = {count}", calls, rounds, f"plain, {DIRECT}")
    seen = {name: _count_events(call) for name, call in calls.items()}
    return rows + [
        count_row(f"{event} in a training step", name, seen[name][event], CALLS)
        for event in EVENTS
        for name in calls
    ]


def _count_events(call: Call) -> Counter[str]:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        call()
    return Counter(event.name for event in seen.events() or ())
