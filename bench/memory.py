"""What is kept: for each cached program, for each wrapper instance over its inner tensors, and after many calls.

Python's own allocations, as `tracemalloc` counts them, and for instances the growth of the process, in which the
tensor's C++ half is too. Programs are those of backend "eager": what a compiler keeps for its kernels is not ours.
"""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import desugar
from bench.subjects import Pair, copy_function, double

INSTANCES = 20_000
CALLS = 10_000
PROGRAMS = 8


@contextmanager
def traced_bytes() -> Iterator[Callable[[], int]]:
    """Inside, the given function says how many bytes more are in use than at the beginning."""
    tracemalloc.start()
    try:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]

        def count() -> int:
            gc.collect()
            return tracemalloc.get_traced_memory()[0] - before

        yield count
    finally:
        tracemalloc.stop()


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


# ---------------------------------------------------------------------------------------------------------
# programs
# ---------------------------------------------------------------------------------------------------------


def bytes_per_program(make: Callable[[Callable], Callable], *, grad: bool) -> float:
    """Bytes that stay when one more size has been compiled for; the first two are not counted."""
    torch.compiler.reset()
    compiled = make(copy_function(double))
    results: list[Any] = []

    def meet(size: int) -> None:
        args = [Pair(torch.rand(size, 3), torch.rand(size, 3)).requires_grad_(grad) for _ in range(5)]
        results[:] = compiled(*args)
        if grad:
            torch.autograd.grad(results, args, [x.detach() for x in args])
        results.clear()

    for size in (2, 3):
        meet(size)
    with traced_bytes() as count:
        for size in range(4, 4 + PROGRAMS):
            meet(size)
        return count() / PROGRAMS


def growth_over_calls(make: Callable[[Callable], Callable], *, grad: bool) -> float:
    """Bytes more in use after 20,000 calls of one program than after 10,000.

    The first 10,000 replace what Python's free lists held before allocations were counted.
    """
    torch.compiler.reset()
    compiled = make(copy_function(double))
    args = [Pair(torch.rand(8, 8), torch.rand(8, 8)).requires_grad_(grad)]
    tangents = [x.detach() for x in args]

    def run(times: int) -> None:
        for _ in range(times):
            results = compiled(*args)
            if grad:
                torch.autograd.grad(results, args, tangents)

    with traced_bytes() as count:
        run(CALLS)
        before = count()
        run(CALLS)
        return float(count() - before)


# ---------------------------------------------------------------------------------------------------------
# instances
# ---------------------------------------------------------------------------------------------------------


def bytes_per_instance(make: Callable[[], Any]) -> dict[str, float]:
    """Bytes of one more instance over the same inner tensors: Python's, and those of the process."""
    kept: list[Any] = [make() for _ in range(1000)]
    with traced_bytes() as count:
        kept.clear()
        kept.extend([None] * INSTANCES)
        before = count()
        for n in range(INSTANCES):
            kept[n] = make()
        python = (count() - before) / INSTANCES
    kept.clear()
    gc.collect()
    more: list[Any] = [make() for _ in range(2 * INSTANCES)]  # beyond what has just been freed
    resident = resident_bytes()
    more += [make() for _ in range(4 * INSTANCES)]
    grown = (resident_bytes() - resident) / (4 * INSTANCES)
    return {"Python": python, "process": grown}


def make_instances() -> dict[str, Callable[[], Any]]:
    """How one more instance is made; the inner tensors are shared."""
    a, b = torch.rand(8, 8), torch.rand(8, 8)

    def bare() -> Tensor:
        return Tensor._make_wrapper_subclass(TwoTensor, (8, 8), (8, 1))  # type: ignore[attr-defined]

    return {
        "a plain tensor (a view)": a.detach,
        "bare wrapper, nothing inside": bare,
        "TwoTensor": lambda: TwoTensor(a, b),
        "declared": lambda: Pair(a, b),
    }


WAYS: dict[str, Callable[[Callable], Callable]] = {
    "torch.compile": lambda fn: torch.compile(fn, backend="aot_eager", fullgraph=True, dynamic=False),
    "desugar.compile": lambda fn: desugar.compile(fn, backend="eager", dynamic=False),
}
