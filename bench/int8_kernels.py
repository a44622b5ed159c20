"""Times the kernels between which products with int8 matrices choose, each for itself, on one thread.

    python -m bench.int8_kernels            # a minute; writes bench/results/int8-kernels.*
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python -m bench.int8_kernels --name int8-kernels-avx2

The limits in `products.py` and `integers.py` of `subclasses/int8/matmul/` are from this table. A figure is the
processor time of the thread in the fastest tenth of the calls, which other processes affect little. The matrix fits
into the cache, so that the figures measure arithmetic, not memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F

from bench.report import Row, print_rows, save_rows
from bench.timing import Timing, describe_machine
from subclasses.int8.matmul import cpu_kernels, integers, products

HEIGHT, WIDTH, ROWS, ROUNDS = 1024, 4096, (1, 4, 16, 32, 64, 256), 20
RESULTS = Path(__file__).parent / "results"


def time_calls(calls: Mapping[str, Callable[[], object]]) -> dict[str, Timing]:
    """Calls each in turns."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            call()
            start = time.thread_time_ns()
            call()
            samples[name].append((time.thread_time_ns() - start) / 1e3)
    return {name: Timing.of(sorted(times)[: max(2, ROUNDS // 10)]) for name, times in samples.items()}


def float_calls(rows: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Returns calls of ``x @ q.T`` and ``g @ q`` by each kernel for int8, and by the kernel for floats."""
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


def rows_of(group: str, timings: Mapping[str, Timing], references: Mapping[str, str]) -> list[Row]:
    """Returns a table: each kernel relative to the first of `references` whose key ends the kernel's name."""
    rows = []
    for name, timing in timings.items():
        of = next(reference for end, reference in references.items() if name.endswith(end))
        ratios = {f"/ {references['']}": timing.median / timings[of].median}
        rows.append(Row(group, name, timing, ratios, ours=name.startswith("own")))
    return rows


def measure() -> list[Row]:
    rows: list[Row] = []
    for count in ROWS:
        for dtype in (torch.float32, torch.bfloat16):
            timings = time_calls(float_calls(count, dtype))
            references = {", transposed": "floats, transposed", "": "floats"}
            rows += rows_of(f"{dtype}, {count} rows".removeprefix("torch."), timings, references)
        rows += rows_of(f"int8, {count} rows", time_calls(integer_calls(count)), {"": "as floats"})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", default="int8-kernels")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = describe_machine()
    rows = measure()
    print_rows(rows)
    save_rows(rows, machine, options.out / f"{options.name}.json", command="bench.int8_kernels")


if __name__ == "__main__":
    main()
