"""What is read off the machine: the peak of the memory, the time, and facts to write beside the figures."""

from __future__ import annotations

import contextlib
import os
import platform
import random
import resource
import time
import timeit
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch

LEAST = 5  # rounds of turns
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_FLAGS = (  # how names of variables begin that change what is measured
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    *("DESUGAR_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE_"),
)
_OURS = ("TORCHINDUCTOR_CACHE_DIR",)  # what a comparison sets itself


def peak_since(start: Callable[[], Any]) -> tuple[Any, float, int]:
    """Runs a function.

    Returns:
        What it returned, its seconds, and the bytes by which it raised the peak of the memory over what was in use
        before: the GPU's if there is one, else the resident memory of this process, without its children.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        used: Callable[[], int] = torch.cuda.max_memory_allocated
        before = torch.cuda.memory_allocated()
    else:
        used = _resident_peak
        before = _reset_resident_peak()
    began = clock()
    result = start()
    seconds = clock() - began
    return result, seconds, max(0, used() - before)


def time_turn(call: Callable[[], Any], repeats: int) -> float:
    """Returns the seconds of a warm call, over so many repeats after one that is not timed: the process has slept."""
    return timeit.Timer(call, setup=call, timer=clock).timeit(repeats) / repeats


def shuffled_rounds(ways: Collection[str], most: int, budget: float) -> Iterator[list[str]]:
    """Yields the ways in an order shuffled anew, for each round of turns.

    There are `most` rounds; fewer, but `LEAST`, where they take more than `budget` seconds.
    """
    rng, end = random.Random(0), time.perf_counter() + budget
    for number in range(most):
        if number < LEAST or time.perf_counter() < end:
            yield rng.sample(list(ways), len(ways))


def clock() -> float:
    """Returns the time, after all work of the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _reset_resident_peak() -> int:
    """Makes the peak what is resident now, where the system can (Linux); returns the peak."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")
    return _resident_peak()


def _resident_peak() -> int:
    """Returns the peak of the resident memory in bytes.

    Linux passes `ru_maxrss` on to a process from the one that started it, so its own counter is read there.
    """
    if not _STATUS.exists():  # macOS, which counts bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def describe_machine() -> tuple[tuple[str, str], ...]:
    """Returns facts about this machine and installation, by name, without the machine's own name."""
    flags = [name for name in sorted(os.environ) if name.startswith(_FLAGS) and name not in _OURS]
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
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
