"""A kernel that reads memory and does nothing else: the floor of a layer that reads its weight once.

A copy is not a floor: it reads half of the bytes that it moves, and its writes may stay in the cache.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

PROGRAMS, BLOCK, WARPS = (
    132 * 8,
    4096,
    4,
)  # eight programs for each multiprocessor, 16 bytes a thread and load


@triton.jit
def read_kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """Adds up numbers of 32 bits: each program adds a block of every `num_programs` blocks, and writes one sum."""
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    start = tl.program_id(0) * BLOCK
    while start < count:
        total += tl.load(x_ptr + start + at, mask=start + at < count, other=0, eviction_policy="evict_first")
        start += tl.num_programs(0) * BLOCK
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))


def read_all(numbers: Tensor, out: Tensor) -> None:
    """Reads a contiguous int32 tensor; `out` gets `PROGRAMS` sums."""
    read_kernel[(PROGRAMS,)](numbers, out, numbers.numel(), BLOCK, num_warps=WARPS)
