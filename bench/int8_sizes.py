"""Benchmarks int8 linear layers where they pay: large weights, batches of 1, 16 and 256, both dtypes, every kind.

    python -m bench.int8_sizes                      # everything, about ten minutes; writes bench/results/int8-sizes.*
    python -m bench.int8_sizes --sizes 4096 --kinds weight-only dynamic --batches 1 16 256
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python -m bench.int8_sizes ...    # as if there were AVX2 alone

Each layer is compared with a linear layer of floats and with torchao's layer of the same kind, both compiled by
`torch.compile`. All run in turns, in one process with two threads. A turn calls a layer twice and times the second
call, so that each layer finds its own data in the caches. A figure is the median of the fastest tenth of the turns: on
a shared machine, the other turns measure the scheduler, which lets one of two threads wait.

*A decode step* runs four layers of width 1024, with attention over a cache of 128 keys, on one row.
"""

from __future__ import annotations

import argparse
import copy
import gc
import random
import time
from collections.abc import Callable, Mapping
from itertools import cycle, product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config as inductor_config

import desugar
from bench.report import Row, print_rows, save_rows
from bench.test_int8 import HAS_TORCHAO, quantize_theirs
from bench.timing import Timing, describe_machine
from subclasses.int8 import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    PerGroup,
    quantize_,
)

Calls = Mapping[str, Callable[[], Any]]
RESULTS = Path(__file__).parent / "results"
NAME = "int8-sizes"
KINDS: dict[str, Any] = {
    "weight-only": Int8WeightOnlyConfig(),
    "weight-only, asymmetric": Int8WeightOnlyConfig(symmetric=False),
    "weight-only, groups of 128": Int8WeightOnlyConfig(PerGroup(128)),
    "dynamic": Int8DynamicActivationInt8WeightConfig(),
    "dynamic, asymmetric": Int8DynamicActivationInt8WeightConfig(
        act_mapping_type="asymmetric", symmetric=False
    ),
}
OF_TORCHAO = ("weight-only", "dynamic")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SIZES, BATCHES = (1024, 4096), (1, 16, 256)
MODES = ("inference", "training")
COMPILERS = {"desugar.compile": desugar.compile, "torch.compile": torch.compile}
PLAIN, DECODE = "floats, torch.compile", "a decode step"

# ---------------------------------------------------------------------------------------------------------
# layers
# ---------------------------------------------------------------------------------------------------------


def make_calls(layer: nn.Module, x: Tensor, kinds: list[str], mode: str) -> dict[str, Callable[[], Any]]:
    """Returns calls of compiled layers by name: of floats, and of each kind by both compilers and torchao."""
    modules: dict[str, Any] = {PLAIN: torch.compile(layer)}
    for kind in kinds:
        quantized = copy.deepcopy(layer)
        quantize_(quantized, KINDS[kind])
        for name, compile_ in COMPILERS.items():
            modules[f"{kind}, {name}"] = compile_(copy.deepcopy(quantized))
        if HAS_TORCHAO and kind in OF_TORCHAO and mode == "inference":
            theirs = copy.deepcopy(layer)
            quantize_theirs(theirs, kind)
            modules[f"{kind}, torchao"] = torch.compile(theirs)
    return {name: bind(module, x, mode) for name, module in modules.items()}


def bind(module: Callable[[Tensor], Tensor], x: Tensor, mode: str) -> Callable[[], Any]:
    """Returns a call: inference, or a step of training with the gradient of the input alone."""
    if mode == "inference":

        def call() -> Any:
            with torch.no_grad():
                return module(x)

    else:
        leaf = x.clone().requires_grad_()

        def call() -> Any:
            y = module(leaf)
            return torch.autograd.grad(y, leaf, torch.ones_like(y))

    return call


def make_layer(
    size: int, batch: int, dtype: str, kinds: list[str], mode: str
) -> dict[str, Callable[[], Any]]:
    torch.manual_seed(0)
    layer = nn.Linear(size, size, dtype=DTYPES[dtype]).requires_grad_(False)
    return make_calls(layer, torch.randn(batch, size, dtype=DTYPES[dtype]), kinds, mode)


# ---------------------------------------------------------------------------------------------------------
# a decode step
# ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer of a language model that extends one row by one entry."""

    def __init__(self, width: int, heads: int = 16, cached: int = 128) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("cache", torch.randn(2, 1, heads, cached, width // heads))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unsqueeze(3).unbind(1)
        keys, values = torch.cat([self.cache[0], k], 2), torch.cat([self.cache[1], v], 2)
        x = x + self.out(F.scaled_dot_product_attention(q, keys, values).flatten(1))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def make_decode(
    dtype: str, kinds: list[str], width: int = 1024, layers: int = 4
) -> dict[str, Callable[[], Any]]:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
    model = nn.Sequential(nn.Embedding(256, width), blocks, nn.LayerNorm(width), nn.Linear(width, 256))
    model = model.to(DTYPES[dtype]).eval().requires_grad_(False)
    return make_calls(model, torch.tensor([65]), kinds, "inference")


# ---------------------------------------------------------------------------------------------------------
# measuring
# ---------------------------------------------------------------------------------------------------------


# Frames between a turn and the loop around it. The interpreter's stack has chunks of 16 KiB. If a frame does not fit
# into the rest of a chunk, each call maps a new one and unmaps it. That takes up to 100 µs for large frames.
DEPTHS = range(0, 160, 8)


def time_fastest(calls: Calls, seconds: float) -> dict[str, Timing]:
    """Times calls in turns, in an order shuffled anew; returns the fastest tenth of the turns of each.

    Each turn is at another depth of the stack.

    Args:
        calls: name -> call.
        seconds: how long all turns of one call take, on average.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order, rng, depths = list(calls), random.Random(0), cycle(DEPTHS)
    for call in calls.values():
        for _ in range(3):
            call()
    gc.collect()
    gc.disable()
    try:
        end = time.perf_counter() + seconds * len(calls)
        while time.perf_counter() < end or len(samples[order[0]]) < 20:
            rng.shuffle(order)
            depth = next(depths)
            for name in order:
                samples[name].append(_time_at(depth, calls[name]))
    finally:
        gc.enable()
    return {name: Timing.of(sorted(times)[: max(2, len(times) // 10)]) for name, times in samples.items()}


def _time_at(depth: int, call: Callable[[], object]) -> float:
    """Returns the time of a call, in µs, after one that is not timed, below so many more frames."""
    if depth:
        return _time_at(depth - 1, call)
    call()
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


def rows_of(group: str, timings: Mapping[str, Timing]) -> list[Row]:
    """Returns a table for each kind: its rows relative to floats, and to torchao's layer of that kind."""
    rows = []
    for kind in KINDS:
        members = {name: t for name, t in timings.items() if name.rpartition(", ")[0] == kind}
        references = {"/ floats": PLAIN, "/ torchao": f"{kind}, torchao"}
        for name, timing in ({PLAIN: timings[PLAIN]} | members if members else {}).items():
            ratios = {
                heading: timing.median / timings[of].median
                for heading, of in references.items()
                if of in timings
            }
            rows.append(Row(f"{group}, {kind}", name, timing, ratios, ours="desugar" in name))
    return rows


def measure(options: argparse.Namespace) -> list[Row]:
    """Measures the chosen layers, then decode steps."""
    rows: list[Row] = []
    for dtype, size, mode, batch in product(options.dtypes, options.sizes, options.modes, options.batches):
        torch.compiler.reset()
        calls = make_layer(size, batch, dtype, options.kinds, mode)
        group = f"{dtype}, {size} by {size}, batch {batch}, {mode}"
        rows += (new_rows := rows_of(group, time_fastest(calls, options.seconds)))
        print_rows(new_rows)
    for dtype in options.dtypes:
        torch.compiler.reset()
        timings = time_fastest(make_decode(dtype, list(OF_TORCHAO)), options.seconds)
        rows += (new_rows := rows_of(f"{DECODE}, {dtype}", timings))
        print_rows(new_rows)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--dtypes", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--modes", choices=MODES, nargs="+", default=list(MODES))
    parser.add_argument("--seconds", type=float, default=1.0, help="for all turns of one call")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(2)
    machine = describe_machine()
    if machine["instructions"] == "AVX2":
        inductor_config.cpp.simdlen = 256  # on a processor that has more, ATen alone is told to use AVX2
    rows = measure(options)
    save_rows(rows, machine, options.out / f"{NAME}.json", command="bench.int8_sizes")


if __name__ == "__main__":
    main()
