"""What is read off the machine: the peak of the memory, the time, and facts to write beside the figures."""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_FLAGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
_FLAG_PREFIXES = ("DESUGAR_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE_")
_SHORT = 0.01  # seconds; a shorter call is run once, untimed, at the start of a turn
_OURS = ("TORCHINDUCTOR_CACHE_DIR",)  # what a comparison sets itself


def peak_since(start: Callable[[], Any]) -> tuple[Any, float, int]:
    """Runs a function.

    Returns:
        What it returned, its seconds, and the bytes by which it raised the peak of the memory over what was in use
        before: the GPU's if there is one, else the resident memory of this process, without its children.
    """
    if torch.cuda.is_available():
        synchronize()
        torch.cuda.reset_peak_memory_stats()
        used: Callable[[], int] = torch.cuda.max_memory_allocated
        before = torch.cuda.memory_allocated()
    else:
        used = _resident_peak
        before = _reset_resident_peak()
    clock = time.perf_counter()
    result = start()
    synchronize()
    seconds = time.perf_counter() - clock
    return result, seconds, max(0, used() - before)


def time_turn(call: Callable[[], Any], repeats: int) -> float:
    """Returns the seconds of a warm call, over so many repeats, without garbage collection."""
    gc.disable()
    try:
        synchronize()
        clock = time.perf_counter()
        call()  # the process has slept, or did something else
        synchronize()
        if (alone := time.perf_counter() - clock) > _SHORT and repeats == 1:
            return alone
        clock = time.perf_counter()
        for _ in range(repeats):
            call()
        synchronize()
        return (time.perf_counter() - clock) / repeats
    finally:
        gc.enable()


def synchronize() -> None:
    """Waits for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _reset_resident_peak() -> int:
    """Makes the peak what is resident now, where the system can (Linux); returns the peak."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")
    return _resident_peak()


def _resident_peak() -> int:
    """Returns the peak of the resident memory in bytes.

    Linux passes `ru_maxrss` on to a process from the one that started it, so its own counter is read there.
    """
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return found if sys.platform == "darwin" else found * 1024
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def describe_machine() -> tuple[tuple[str, str], ...]:
    """Returns facts about this machine and installation, by name, without the machine's own name."""
    facts = [
        ("torch", torch.__version__),
        ("Python", platform.python_version()),
        ("CPU", f"{_cpu_model()}, {os.cpu_count()} cores"),
        ("threads", str(torch.get_num_threads())),
        ("GPU", torch.cuda.get_device_name() if torch.cuda.is_available() else "none"),
    ]
    flags = [name for name in sorted(os.environ) if name in _FLAGS or name.startswith(_FLAG_PREFIXES)]
    facts += [(name, os.environ[name]) for name in flags if name not in _OURS]
    return tuple(facts)


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
