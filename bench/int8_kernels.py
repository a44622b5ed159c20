"""Times the kernels between which products with int8 matrices choose, each for itself, on one thread.

    python -m bench.int8_kernels
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python -m bench.int8_kernels      # as if there were AVX2 alone

The limits in `subclasses/int8/products.py` and `integers.py` are from this table. A figure is the least processor time
of the thread, so that it means something on a machine that others use too; more threads share the work evenly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from subclasses.int8 import cpu_kernels, integers, products

HEIGHT, WIDTH, ROWS, ROUNDS = 1024, 4096, (1, 4, 16, 32, 64, 256), 10


def least_ms(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Calls each in turns and returns the least processor time in milliseconds."""
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            call()
            start = time.thread_time_ns()
            call()
            least[name] = min(least[name], (time.thread_time_ns() - start) / 1e6)
    return least


def float_calls(rows: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Returns ``x @ q.T`` and ``g @ q`` by each kernel, and by that of floats."""
    q = torch.randint(-128, 128, (HEIGHT, WIDTH), dtype=torch.int8)
    w, x, g = (torch.randn(size).to(dtype) for size in ((HEIGHT, WIDTH), (rows, WIDTH), (rows, HEIGHT)))
    calls: dict[str, Callable[[], object]] = {
        "floats": lambda: F.linear(x, w),
        "in parts": lambda: products._in_parts(x, q, None, None),
        "floats, transposed": lambda: g @ w,
        "in parts, transposed": lambda: products._in_parts(g, q.t(), None, None),
    }
    if cpu_kernels.library() is not None:
        calls["own"] = lambda: products._by_rows(x, q, None, None)
        calls["own, transposed"] = lambda: products._by_columns(g, q.t(), None, None)
    if dtype is torch.bfloat16:
        calls["packed"] = lambda: products._packed(x, q, None, None)
    return calls


def integer_calls(rows: int) -> dict[str, Callable[[], object]]:
    """Returns exact products by each kernel."""
    a, q = (torch.randint(-128, 128, (n, WIDTH), dtype=torch.int8) for n in (rows, HEIGHT))
    calls: dict[str, Callable[[], object]] = {"as floats": lambda: integers._as_floats(a, q)}
    if cpu_kernels.library() is not None:
        calls["own"] = lambda: cpu_kernels.integers_times_rows(a, q)
    if not integers.is_without_vnni():
        calls["_int_mm"] = lambda: integers._int_mm(a, q)
    return calls


def main() -> None:
    torch.set_num_threads(1)
    print(f"{torch.backends.cpu.get_cpu_capability()}, {HEIGHT} by {WIDTH}, ms on one thread")
    for rows in ROWS:
        for dtype in (torch.float32, torch.bfloat16):
            print_line(f"{dtype}".removeprefix("torch."), rows, least_ms(float_calls(rows, dtype)))
        print_line("int8", rows, least_ms(integer_calls(rows)))


def print_line(dtype: str, rows: int, times: Mapping[str, float]) -> None:
    print(f"{dtype}, {rows} rows: " + "; ".join(f"{name} {ms:.3f}" for name, ms in times.items()))


if __name__ == "__main__":
    main()
