"""Times calls side by side: each round runs every call once, in a new random order."""

from __future__ import annotations

import gc
import os
import platform
import random
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from types import FunctionType
from typing import Any, TypeVar

import torch

Call = Callable[[], Any]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median over the rounds, and the lower and upper quartile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        low, _, high = quantiles(samples, n=4)
        return cls(median(samples), low, high)

    def __str__(self) -> str:
        if self.low == self.high:  # a count, or a single measurement
            return f"{self.median:,.0f}" if self.median == round(self.median) else f"{self.median:,.1f}"
        digits = 2 if abs(self.median) >= 1 else 3
        return f"{self.median:.{digits}f} ± {(self.high - self.low) / 2:.{digits}f}"


def time_side_by_side(
    calls: Mapping[Key, Call], *, rounds: int = 100, round_ms: float = 2.0
) -> dict[Key, Timing]:
    """Times all `calls` in turns, with the garbage collector off.

    Args:
        calls: Key -> call.
        rounds: The number of turns of each call.
        round_ms: The duration of a turn in milliseconds; it repeats its call accordingly.
    """
    turns = {key: (call, _repeats(call, round_ms)) for key, call in calls.items()}
    samples: dict[Key, list[float]] = {key: [] for key in calls}
    order, rng = list(calls), random.Random(0)
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            rng.shuffle(order)
            for key in order:
                samples[key].append(_microseconds(*turns[key]))
    finally:
        gc.enable()
    return {key: Timing.of(values) for key, values in samples.items()}


def _microseconds(call: Call, repeats: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(repeats):
        call()
    return (time.perf_counter_ns() - start) / repeats / 1e3


def _repeats(call: Call, round_ms: float) -> int:
    return max(1, round(1e3 * round_ms / min(_microseconds(call, 10) for _ in range(3))))


def copy_function(fn: FunctionType) -> FunctionType:
    """Copies a function with its code object: Dynamo caches compiled frames per code object."""
    return FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__)


# ---------------------------------------------------------------------------------------------------------
# the machine
# ---------------------------------------------------------------------------------------------------------


def environment_with_byte_code(folder: Path) -> dict[str, str]:
    """Returns the environment of a process that keeps byte code in a folder, as installed packages have it."""
    environment = os.environ | {"PYTHONPYCACHEPREFIX": str(folder)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def describe_machine() -> dict[str, str | int]:
    """Returns the processor, its instructions that PyTorch uses, and the versions, without the machine's name."""
    return {
        "cpu": _cpu_model(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
