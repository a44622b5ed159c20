"""Checks predictions where they can be checked: on the CPU, bytes counted of a kernel against its measured time.

    python -m bench.predictions              # writes bench/results/predictions.json and .md

Inductor compiles functions that spend their time on moving memory. `bench.prediction.traffic` counts their bytes as it
does for kernels on a GPU. The predicted time is their bytes over the bandwidth of this machine, which a copy measures
in the same rounds. A CPU reads a line of memory before it writes to it, a GPU does not. So a buffer that a kernel
writes and does not read counts twice here.

The error is how far the predicted time is off the measured one. It holds for the counting of bytes, not for a device:
caches, launches and the speed of memory differ. Some kernels move no more bytes a second when their operands fit into
the cache. Arithmetic on one core bounds these kernels, so their bytes alone do not predict their time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.compiler.config
import torch.nn.functional as F
from torch import Tensor

import desugar
from bench.prediction._torch_patches import noting_host_kernels
from bench.prediction.traffic import count_kernel
from bench.report import Row, print_rows, save_rows
from bench.subjects import copy_function
from bench.timing import Timing, describe_machine, time_side_by_side

RESULTS = Path(__file__).parent / "results"
COPY = "copy"
OURS = "desugar.compile"

# ---------------------------------------------------------------------------------------------------------
# subjects
# ---------------------------------------------------------------------------------------------------------


# Each writes into its first argument: clearing the pages of a new result takes the system longer than computing it.


def add(out: Tensor, x: Tensor, y: Tensor) -> None:
    out.copy_(x + y)


def scale_shift(out: Tensor, x: Tensor, w: Tensor, b: Tensor) -> None:
    out.copy_((x * w + b).relu())


def total(out: Tensor, x: Tensor) -> None:
    out[:, 0].copy_(x.sum(-1))


def largest(out: Tensor, x: Tensor) -> None:
    out[:, 0].copy_(x.amax(-1))


def normalize(out: Tensor, x: Tensor, w: Tensor, b: Tensor) -> None:
    out.copy_(F.layer_norm(x, x.shape[-1:], w, b))


def dequantize(out: Tensor, q: Tensor, scale: Tensor) -> None:
    out.copy_(q.to(scale.dtype) * scale)


def take(out: Tensor, x: Tensor, rows: Tensor) -> None:
    out[: len(rows)].copy_(x[rows] * 2)


def add_in_place(out: Tensor, x: Tensor) -> None:
    out.add_(x)


def make_subjects(rows: int, width: int = 1024) -> dict[str, tuple[Callable[..., None], tuple[Tensor, ...]]]:
    """Returns functions and their arguments by name; the largest arguments have `rows * width` entries."""
    out, x, y = torch.empty(rows, width), torch.randn(rows, width), torch.randn(rows, width)
    w, b = torch.randn(width), torch.randn(width)
    q, scale = torch.randint(-128, 128, (rows, width), dtype=torch.int8), torch.rand(rows, 1)
    return {
        "x + y": (add, (out, x, y)),
        "out += x": (add_in_place, (out, x)),
        "(x * w + b).relu()": (scale_shift, (out, x, w, b)),
        "x.sum(-1)": (total, (out, x)),
        "x.amax(-1)": (largest, (out, x)),
        "layer_norm(x)": (normalize, (out, x, w, b)),
        "dequantize int8": (dequantize, (out, q, scale)),
        "half of the rows of x, * 2": (take, (out, x, torch.randperm(rows)[: rows // 2])),
    }


# ---------------------------------------------------------------------------------------------------------
# counting and measuring
# ---------------------------------------------------------------------------------------------------------


def compile_and_count(fn: Callable[..., None], args: tuple[Tensor, ...]) -> tuple[Callable[[], None], int]:
    """Returns a call of the compiled function, and the bytes that its kernels move on a CPU."""
    counted: list[int] = []

    def define(nodes: Any, kernel_args: Any) -> None:
        traffic = count_kernel(nodes, [kernel_args])
        reads, writes = (sum(by_dtype.values()) for by_dtype in (traffic.reads, traffic.writes))
        is_read = kernel_args.inplace_buffers or kernel_args.input_buffers.keys() & kernel_args.output_buffers
        counted.append(reads + (writes if is_read else 2 * writes))

    compiled = desugar.compile(
        copy_function(fn), options={"fx_graph_cache": False}
    )  # a cached graph is not lowered

    def call() -> None:
        with torch.no_grad():
            compiled(*args)

    # A stored program, or a cached graph, would not be lowered.
    with torch.compiler.config.patch(force_disable_caches=True), noting_host_kernels(define):
        call()
    if not counted:
        raise RuntimeError(
            f"expected kernels of {fn.__name__}, and Inductor wrote none: it took a stored program"
        )
    return call, sum(counted)


def measure_predictions(rounds: int, rows: int = 16384, cached: int = 192) -> list[Row]:
    """Measures each function on many rows, on few, and a copy, side by side; predicts from bytes and the copy."""
    source, target = torch.randn(rows, 1024), torch.empty(rows, 1024)
    calls: dict[tuple[str, int], Callable[[], Any]] = {(COPY, rows): lambda: target.copy_(source)}
    counted = {(COPY, rows): 3 * source.nbytes}
    for number in (rows, cached):
        for name, (fn, args) in make_subjects(number).items():
            calls[name, number], counted[name, number] = compile_and_count(fn, args)
    timings = time_side_by_side(calls, rounds=rounds)
    speed = counted[COPY, rows] / timings[COPY, rows].median  # bytes a microsecond
    predicted_rows, errors = [], []
    for name in make_subjects(1):
        timing, predicted = timings[name, rows], counted[name, rows] / speed
        ratios = {
            "MB": counted[name, rows] / 1e6,
            "GB/s": counted[name, rows] / timing.median / 1e3,
            "GB/s in cache": counted[name, cached] / timings[name, cached].median / 1e3,
            "predicted µs": predicted,
            "predicted / measured": predicted / timing.median,
        }
        errors.append(abs(predicted / timing.median - 1))
        predicted_rows.append(Row("bytes counted, time measured", name, timing, ratios))
    copied = Row(COPY, f"{2 * source.nbytes / 1e6:.0f} MB", timings[COPY, rows], {"GB/s": speed / 1e3})
    worst = {"median": statistics.median(errors), "largest": max(errors)}
    summary = [
        Row("error of the predicted time", name, Timing(*[100 * value] * 3), unit="%")
        for name, value in worst.items()
    ]
    return [copied, *predicted_rows, *summary]


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--out", type=Path, default=RESULTS / "predictions.json")
    options = parser.parse_args(arguments)
    rows = measure_predictions(options.rounds, options.rows)
    print_rows(rows)
    save_rows(rows, describe_machine(), options.out, rounds=options.rounds, command="bench.predictions")


if __name__ == "__main__":
    main()
