"""What is kept: for each cached program, for each wrapper instance over its inner tensors, and after many calls.

Python's own allocations, as `tracemalloc` counts them, and for instances those of the tensor's C++ half, as the C
library counts them. Programs are those of backend "eager": what a compiler keeps for its kernels is not ours.
"""

from __future__ import annotations

import ctypes
import gc
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import desugar
from bench.subjects import Pair, copy_function, double

INSTANCES = 20_000
CALLS = 10_000
BLOCKS = 5
GROWTH = f"growth over {CALLS:,} calls"
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


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def allocated_bytes() -> int:
    """Bytes that `malloc` has given out, which are C++'s: Python's small objects lie elsewhere.

    Raises:
        AttributeError: The C library does not say.
    """
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    return mallinfo().uordblks


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


def growth_over_calls(make: Callable[[Callable], Callable], *, grad: bool) -> list[float]:
    """Bytes more in use after each further 10,000 calls of one program.

    The first 10,000 are not counted: they replace what Python's free lists held before allocations were noted.
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
        marks = [count()]
        for _ in range(BLOCKS):
            run(CALLS)
            marks.append(count())
    return [float(after - before) for before, after in pairwise(marks)]


# ---------------------------------------------------------------------------------------------------------
# instances
# ---------------------------------------------------------------------------------------------------------


def bytes_per_instance(make: Callable[[], Any]) -> dict[str, float]:
    """Bytes of one more instance over the same inner tensors: Python's, and those of the tensor's C++ half."""
    kept: list[Any] = [None] * INSTANCES

    def fill() -> None:
        for n in range(INSTANCES):
            kept[n] = make()

    fill()  # what is made once, and free lists
    kept[:] = [None] * INSTANCES
    before = allocated_bytes()
    fill()
    outside = allocated_bytes() - before
    kept[:] = [None] * INSTANCES
    with traced_bytes() as count:
        before = count()
        fill()
        inside = count() - before
    return {"Python": inside / INSTANCES, "C++": outside / INSTANCES}


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
