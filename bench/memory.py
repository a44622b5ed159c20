"""Measures memory that stays allocated: per program, per wrapper instance without its inner tensors, and per call.

`tracemalloc` counts Python's allocations. For instances, the C library counts the memory of the tensor's C++ half, too.
Programs use the backend "eager", so that the memory of a compiler's kernels is not counted.
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
    """Yields a function that returns by how many bytes Python's memory has grown since the start."""
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
    """Returns the bytes allocated by `malloc`, mainly from C++: Python's small objects have their own allocator.

    Raises:
        AttributeError: The C library has no `mallinfo2`.
    """
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    return mallinfo().uordblks


# ---------------------------------------------------------------------------------------------------------
# programs
# ---------------------------------------------------------------------------------------------------------


def bytes_per_program(make: Callable[[Callable], Callable], *, grad: bool) -> float:
    """Returns the bytes that one more program keeps, for a further size; the first two sizes are not counted."""
    torch.compiler.reset()
    compiled = make(copy_function(double))
    results: list[Any] = []

    def call_with(size: int) -> None:
        args = [Pair(torch.rand(size, 3), torch.rand(size, 3)).requires_grad_(grad) for _ in range(5)]
        results[:] = compiled(*args)
        if grad:
            torch.autograd.grad(results, args, [x.detach() for x in args])
        results.clear()

    for size in (2, 3):
        call_with(size)
    with traced_bytes() as count:
        for size in range(4, 4 + PROGRAMS):
            call_with(size)
        return count() / PROGRAMS


def growth_over_calls(make: Callable[[Callable], Callable], *, grad: bool) -> list[float]:
    """Returns the growth in bytes over each block of 10,000 calls of one program.

    The first block is not counted: it replaces objects that Python's free lists held before `tracemalloc` started.
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
    """Returns the bytes of one more instance over the same inner tensors, in Python and in its C++ half."""
    instances: list[Any] = [None] * INSTANCES

    def fill() -> None:
        for n in range(INSTANCES):
            instances[n] = make()

    fill()  # caches, and Python's free lists
    instances[:] = [None] * INSTANCES
    before = allocated_bytes()
    fill()
    outside = allocated_bytes() - before
    instances[:] = [None] * INSTANCES
    with traced_bytes() as count:
        before = count()
        fill()
        inside = count() - before
    return {"Python": inside / INSTANCES, "C++": outside / INSTANCES}


def make_instances() -> dict[str, Callable[[], Any]]:
    """Returns functions that make one more instance over shared inner tensors, by name."""
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
