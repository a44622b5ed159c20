"""The host's time of calls with wrapped arguments, launches apart, and the CUDA runtime calls of a training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu.device import Call
from bench.gpu.run import Run, Turns
from bench.timing import copy_function

# ---------------------------------------------------------------------------------------------------------
# the host's time
# ---------------------------------------------------------------------------------------------------------

STOCK, DIRECT = "torch.compile", "desugar.compile"
LAUNCHES = "the compiled kernels alone, on prepared tensors"
MODES = ("inference", "training")


def measure_calls(run: Run, counts: Sequence[int] | None = None) -> None:
    """Times calls on tensors so small that a launch takes longer than its kernel; calls do not synchronize.

    The kernels alone are the compiled graph of inference, called with prepared tensors. The host time of a call minus
    theirs is the time of checks, wrapping and autograd. Every way and kind runs the same number of kernels.
    """
    from bench.subjects import KINDS

    for mode in MODES:
        for count in counts or run.device.pick((20, 1), (2,)):
            torch.compiler.reset()
            makers: dict[str, Callable[[], Call]] = {}
            if mode == "inference":
                makers[LAUNCHES] = partial(_launches, run, count)
            for kind in KINDS:
                for way in (STOCK, DIRECT):
                    makers[f"{kind}, {way}"] = partial(_make_call, run, mode, count, kind, way)
            turns = Turns(f"plain, {STOCK}", host=True, seconds=2.0)
            run.compare(f"{mode}, N = {count}", makers, turns)


def _make_args(run: Run, count: int, kind: str) -> list[Any]:
    from bench.subjects import KINDS, SHAPE

    pairs = [[torch.rand(SHAPE, device=run.device.name) for _ in "ab"] for _ in range(count)]
    return [x for pair in pairs for x in KINDS[kind](*pair)]


def _make_call(run: Run, mode: str, count: int, kind: str, way: str) -> Call:
    import desugar
    from bench.subjects import double

    compiler = {STOCK: partial(torch.compile, fullgraph=True), DIRECT: desugar.compile}[way]
    fn = run.device.compile(compiler, copy_function(double))
    args = _make_args(run, count, kind)
    if mode == "inference":
        return torch.no_grad()(lambda: fn(*args))
    args, tangents = [x.requires_grad_() for x in args], _make_args(run, count, kind)
    return lambda: torch.autograd.grad(fn(*args), args, tangents)


def _launches(run: Run, count: int) -> Call:
    """Returns a call of the graph that was compiled for `desugar.compile`, with prepared tensors."""
    import desugar
    from bench.subjects import double

    args = _make_args(run, count, "declared")
    compiled: Any = run.device.compile(desugar.compile, copy_function(double))
    with torch.no_grad():
        compiled(*args)
    (program,) = compiled.programs
    graph = program.run.__globals__["compiled_graph"]
    tensors = [inner for x in args for inner in (x.a, x.b)]
    return lambda: graph([*tensors])


# ---------------------------------------------------------------------------------------------------------
# events
# ---------------------------------------------------------------------------------------------------------

CALLS = "calls"  # the unit of the counts
EVENTS = (
    "cudaEventRecord",
    "cudaEventRecordWithFlags",
    "cudaStreamWaitEvent",
    "cudaEventSynchronize",
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
)


def measure_events(run: Run, count: int | None = None, events: Sequence[str] = EVENTS) -> None:
    """Times one training step, and counts its calls of the CUDA runtime."""
    count = count or run.device.pick(20, 2)
    makers = {
        f"{kind}, {DIRECT}": partial(_make_call, run, MODES[1], count, kind, DIRECT)
        for kind in ("plain", "declared")
    }
    after = partial(_count_events, run, events)
    turns = Turns(f"plain, {DIRECT}", host=True, seconds=2.0, after=after)
    run.compare(f"training, N = {count}", makers, turns)


def _count_events(run: Run, events: Sequence[str], group: str, name: str, call: Call) -> None:
    activities = [ProfilerActivity.CPU]
    if run.device.name == "cuda":
        activities.append(ProfilerActivity.CUDA)
    run.device.synchronize()
    with profile(activities=activities) as seen:
        call()
    counts = Counter(event.name for event in seen.events() or ())
    for event in events:
        run.number(group, name, event, counts[event], CALLS)
