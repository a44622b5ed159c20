"""The device that a stage measures on: CUDA, or the CPU, which rehearses every stage with small sizes."""

from __future__ import annotations

import gc
import hashlib
import importlib.metadata
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], Any]
T = TypeVar("T")
ROOT = Path(__file__).parents[2]
KERNELS_A_GRAPH = 64  # fewer nodes would measure the replay itself


class Device(Protocol):
    """The interface between a stage and its device."""

    name: str
    rehearsal: bool

    def describe(self) -> str:
        """Returns the device and the versions, as one text."""
        ...

    def pick(self, real: T, small: T) -> T:
        """Returns a size for this device: `small` in a rehearsal."""
        ...

    def compile(self, compiler: Callable[..., Any], fn: Callable, **options: Any) -> Callable:
        """Compiles `fn` by `torch.compile` or `desugar.compile`; a rehearsal captures it, and compiles no kernels."""
        ...

    def synchronize(self) -> None: ...

    def time(self, call: Call, times: int) -> float:
        """Returns the microseconds of one of `times` calls, up to the end of the last kernel."""
        ...

    def time_host(self, call: Call, times: int) -> float:
        """Returns the microseconds until one of `times` calls returns, while the device is still at work."""
        ...

    def record(self, steps: Sequence[Call]) -> Call:
        """Returns a call that replays the kernels of the steps as one CUDA graph."""
        ...

    def peak(self, call: Call) -> float | None:
        """Returns the peak memory of a call in GiB, above the memory before it; None if it is not counted."""
        ...

    def kernels(self, call: Call) -> list[tuple[str, int, float]]:
        """Returns the name, count and summed microseconds of each kernel that a call runs, the longest first."""
        ...

    def free(self) -> None:
        """Returns unused memory to the device."""
        ...


def has_cuda() -> bool:
    return torch.cuda.is_available()


# ---------------------------------------------------------------------------------------------------------
# CUDA
# ---------------------------------------------------------------------------------------------------------


class Cuda:
    """The first CUDA device."""

    name = "cuda"
    rehearsal = False

    def describe(self) -> str:
        return _describe(torch.cuda.get_device_name())

    def pick(self, real: T, small: T) -> T:
        return real

    def compile(self, compiler: Callable[..., Any], fn: Callable, **options: Any) -> Callable:
        return compiler(fn, **options)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def time(self, call: Call, times: int) -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(times):
            call()
        last.record()
        last.synchronize()
        return 1e3 * first.elapsed_time(last) / times

    def time_host(self, call: Call, times: int) -> float:
        torch.cuda.synchronize()
        return _time_by_clock(call, times)

    def record(self, steps: Sequence[Call]) -> Call:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles, and lets libraries allocate their workspaces
            for step in [*steps] * 2:
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for step in steps:
                step()
        return graph.replay

    def peak(self, call: Call) -> float | None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**30

    def kernels(self, call: Call) -> list[tuple[str, int, float]]:
        self.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            call()
            self.synchronize()
        kernels = [
            (event.key, event.count, float(event.self_device_time_total))
            for event in seen.key_averages()
            if event.self_device_time_total > 0
            and "CUDA" in str(event.device_type)
            and not getattr(event, "is_user_annotation", False)  # such as an optimizer's step
        ]
        return sorted(kernels, key=lambda kernel: -kernel[2])

    def free(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


# ---------------------------------------------------------------------------------------------------------
# the CPU in a rehearsal
# ---------------------------------------------------------------------------------------------------------


class StandIn:
    """The CPU: a clock in place of events, a loop in place of a graph, no memory figures."""

    name = "cpu"
    rehearsal = True

    def describe(self) -> str:
        return _describe("a CPU, in a rehearsal")

    def pick(self, real: T, small: T) -> T:
        return small

    def compile(self, compiler: Callable[..., Any], fn: Callable, **options: Any) -> Callable:
        options.pop("mode", None)  # CUDA graphs
        return compiler(fn, backend="eager", **options)

    def synchronize(self) -> None:
        pass

    def time(self, call: Call, times: int) -> float:
        return _time_by_clock(call, times)

    def time_host(self, call: Call, times: int) -> float:
        return _time_by_clock(call, times)

    def record(self, steps: Sequence[Call]) -> Call:
        def replay() -> None:
            for step in steps:
                step()

        replay()
        return replay

    def peak(self, call: Call) -> float | None:
        call()
        return None

    def kernels(self, call: Call) -> list[tuple[str, int, float]]:
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            call()
        kernels = [
            (event.key, event.count, float(event.self_cpu_time_total)) for event in seen.key_averages()
        ]
        return sorted(kernels, key=lambda kernel: -kernel[2])

    def free(self) -> None:
        gc.collect()


def _time_by_clock(call: Call, times: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(times):
        call()
    return (time.perf_counter_ns() - start) / times / 1e3


# ---------------------------------------------------------------------------------------------------------
# the device, the versions and the sources, on which a figure depends
# ---------------------------------------------------------------------------------------------------------


def _describe(device: str) -> str:
    triton = "none"
    with suppress(importlib.metadata.PackageNotFoundError):
        triton = importlib.metadata.version("triton")
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, Triton {triton}"
    return f"{device}; {versions}, Python {platform.python_version()}; sources {hash_sources()}"


def hash_sources() -> str:
    """Returns eight digits that change with any source file of the packages and of these benchmarks."""
    digest = hashlib.sha256()
    for folder in ("subclasses", "desugar", "bench/gpu"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def at_least_64(steps: Sequence[Call]) -> list[Call]:
    """Repeats steps until a graph of them has enough kernels to time them, and not its replay."""
    return [*steps] * -(-KERNELS_A_GRAPH // len(steps))


def as_inputs(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().requires_grad_() for tensor in tensors]
