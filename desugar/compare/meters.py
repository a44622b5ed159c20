"""Measures peak memory and time, and describes the machine."""

from __future__ import annotations

import os
import platform
import random
import time
import timeit
from collections.abc import Callable, Collection, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

LEAST = 5  # the least number of rounds
_FLAGS = (  # prefixes of environment variables that affect a measurement
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    *("DESUGAR_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE_"),
)


def profile_call(call: Callable[[], Any]) -> tuple[int, float | None]:
    """Runs a function, and profiles its memory and its graphs.

    Returns:
        The bytes by which it raised the peak of PyTorch's allocated memory, on the GPU if there is one. The seconds in
        plain graphs of this library: None if it ran none, and on a GPU, which runs kernels asynchronously.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before, None
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would print lines of its own
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        call()
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())  # type: ignore[union-attr]
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]  # type: ignore[attr-defined]
    graphs = [event.duration_ns() for event in events if event.name().startswith("desugar graph: ")]
    return max(accumulate(changes, initial=0)), sum(graphs) / 1e9 if graphs else None


def time_turn(call: Callable[[], Any], repeats: int) -> float:
    """Returns the mean seconds of warm calls, after one untimed call, since the process has slept."""
    return timeit.Timer(call, setup=call, timer=clock).timeit(repeats) / repeats


def shuffled_rounds(ways: Collection[str], most: int, budget: float) -> Iterator[list[str]]:
    """Yields the ways in a new random order for each round.

    There are `most` rounds; fewer, but at least `LEAST`, if they take more than `budget` seconds.
    """
    rng, end = random.Random(0), time.perf_counter() + budget
    for number in range(most):
        if number < LEAST or time.perf_counter() < end:
            yield rng.sample(list(ways), len(ways))


def clock() -> float:
    """Returns the time in seconds, after synchronizing the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def describe_machine() -> tuple[tuple[str, str], ...]:
    """Returns facts about this machine and installation, by name, without the machine's own name."""
    # A comparison sets the folder of caches itself.
    flags = [
        name for name in sorted(os.environ) if name.startswith(_FLAGS) and name != "TORCHINDUCTOR_CACHE_DIR"
    ]
    return (
        ("torch", torch.__version__),
        ("Python", platform.python_version()),
        ("CPU", f"{_cpu_model()}, {os.cpu_count()} cores"),
        ("threads", str(torch.get_num_threads())),
        ("GPU", torch.cuda.get_device_name() if torch.cuda.is_available() else "none"),
        *((name, os.environ[name]) for name in flags),
    )


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    known = [line.split(":", 1) for line in (info.read_text().splitlines() if info.exists() else [])]
    names = (value[0].strip() for key, *value in known if key.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
