"""Benchmarks linear layers with int8 weights on a GPU against bfloat16, torchao, and a copy of as many bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import desugar
from bench.gpu_timing import Call, per_item, synced
from bench.layouts import HAS_TORCHAO, multiply, torchao_weights
from bench.report import Row
from bench.subjects import copy_function
from bench.timing import time_side_by_side
from subclasses.int8 import Int8Tensor

CACHE = 2**28  # bytes of int8 weights that one turn reads: more than any GPU cache has
PLAIN, LIMIT = "bf16, torch.compile", "limit: copying, moving as many bytes as the int8 weight has"
WEIGHT_ONLY = "int8 weight-only, desugar.compile"
Kinds = dict[str, tuple[Callable, Sequence[Tensor]]]


@torch.no_grad()
def measure_int8(
    rounds: int,
    sizes: Sequence[int] = (4096, 8192),
    batches: Sequence[int] = (1, 16, 256, 4096),
    device: str = "cuda",
) -> list[Row]:
    """Times one linear layer, weight-only and dynamic, in CUDA graphs over more weights than a cache holds."""
    rows = []
    for size in sizes:
        shape, options = (size, size), {"device": device, "dtype": torch.bfloat16}
        weights = [torch.randn(shape, **options) for _ in range(max(1, CACHE // size**2))]
        kinds = _int8_kinds(weights)
        for m in batches:
            torch.compiler.reset()
            x = torch.randn(m, size, **options)
            calls = {}
            for name, (compile, operands) in kinds.items():
                fn = compile(copy_function(multiply))
                calls[name] = [lambda f=fn, x=x, w=w: f(x, w) for w in operands]
            half = torch.empty(len(weights), size * size // 2, dtype=torch.int8, device=device)
            calls[LIMIT] = [part.clone for part in half]  # reads half of the bytes and writes half
            rows += _layer_rows(f"int8, M = {m}, N = K = {size}", calls, rounds)
    return rows


def _int8_kinds(weights: list[Tensor]) -> Kinds:
    """Returns the compiler and the weights of each kind, by name."""
    kinds: Kinds = {
        PLAIN: (torch.compile, weights),
        WEIGHT_ONLY: (desugar.compile, [Int8Tensor.from_float(w) for w in weights]),
        "int8 dynamic, desugar.compile": (
            desugar.compile,
            [Int8Tensor.from_float(w, activation="row") for w in weights],
        ),
    }
    for name, kind in (
        ("int8 weight-only, torchao", "torchao"),
        ("int8 dynamic, torchao", "dynamic torchao"),
    ):
        theirs = [torchao_weights(w)[kind] for w in weights if HAS_TORCHAO]
        if theirs:
            kinds[name] = (torch.compile, theirs)
    return kinds


def _layer_rows(group: str, calls: dict[str, list[Call]], rounds: int) -> list[Row]:
    """Returns the time of one call of each kind, with ratios to bfloat16 and to the limit."""
    graphs = {name: graph for name, steps in calls.items() if (graph := _as_graph(name, steps))}
    timings = time_side_by_side({name: synced(graph) for name, graph in graphs.items()}, rounds=rounds)
    plain, limit = timings[PLAIN].median, timings[LIMIT].median
    rows = []
    for name, t in timings.items():
        one = per_item(t, len(calls[name]))
        ratios = {f"/ {PLAIN}": t.median / plain, "limit / this": limit / t.median}
        rows.append(Row(group, name, one, ratios, ours="desugar" in name))
    return rows


def _as_graph(name: str, steps: list[Call]) -> Call | None:
    """Records steps as one CUDA graph, which excludes the CPU time of launches; None if a rival cannot be recorded."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):  # compiles, and lets libraries allocate their workspaces
            for step in steps * 2:
                step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            for step in steps:
                step()
    except RuntimeError as error:  # torchao's dynamic layer multiplies no fewer than 17 rows, for one
        if "torchao" not in name:
            raise
        print(f"no figure for {name}: {error}", file=sys.stderr)
        return None
    return graph.replay
