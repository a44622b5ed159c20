"""Measures compile time with empty Inductor caches, in a process that has compiled before.

Each round compiles the same function in each way, one after the other, each time in an empty cache directory. A cold
start is the first call and, in training, the first backward. `bench.starts` measures fresh processes instead: the
imports, and the start of a second process from the caches of a first one.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._inductor.codecache  # `fresh_cache` clears the state of imported modules
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from bench.subjects import KINDS, SHAPE, WAYS, copy_function, double
from desugar.recording.listeners import Recording, listen

STOCK, DIRECT = "torch.compile", "desugar.compile"
COMPILED = (STOCK, 'torch.compile(backend="desugar")', DIRECT)


def layer(x: Tensor, *weights: Tensor) -> list[Tensor]:
    """Computes a chain of pointwise ops, some work for a compiler; returns every intermediate."""
    results = []
    for w in weights:
        x = torch.sigmoid(x * w) + x
        results.append(x)
    return results


FUNCTIONS: dict[str, Callable[..., Any]] = {"x * 2, N = 5": double, "chain, N = 5": layer}


@dataclass
class Compiled:
    """Compile times of one function, mode and way, in seconds; one entry per round.

    Attributes:
        cold: Cold starts.
        stages: Stage of desugar -> its part of the cold starts.
    """

    cold: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


# ---------------------------------------------------------------------------------------------------------
# measuring
# ---------------------------------------------------------------------------------------------------------


def measure_compiling(rounds: int, ways: tuple[str, ...] = COMPILED) -> dict[tuple[str, str, str], Compiled]:
    """Returns compile times by (function, mode, way)."""
    for way in ways:  # work done once per process, such as finding the C++ compiler, is not measured
        with fresh_cache():
            compile_once(way, lambda x: x + 1, [torch.rand(3)], "inference")
    results: dict[tuple[str, str, str], Compiled] = defaultdict(Compiled)
    for _ in range(rounds):
        for name, fn in FUNCTIONS.items():
            for mode in ("inference", "training"):
                for way in ways:
                    _measure(results[name, mode, way], way, fn, mode)
    return dict(results)


def _measure(into: Compiled, way: str, fn: Callable, mode: str) -> None:
    with fresh_cache():
        with _stages(into.stages):
            seconds, compiled = compile_once(way, fn, make_args(), mode)
        into.cold.append(seconds)
        if way == DIRECT:
            variants_of = [program.variants for program in compiled.programs]
            late = sum(variants.late_seconds for variants in variants_of if variants is not None)
            into.stages["first backward"].append(late)


def make_args() -> list[Tensor]:
    return [x for _ in range(5) for x in KINDS["TwoTensor"](torch.rand(SHAPE), torch.rand(SHAPE))]


def compile_once(way: str, fn: Callable, args: list[Tensor], mode: str) -> tuple[float, Any]:
    """Compiles a function and calls it, in training with its backward; returns the seconds and the function."""
    torch.compiler.reset()
    counters.clear()
    if mode == "training":
        args = [x.requires_grad_() for x in args]
        tangents = [x.detach() for x in make_args()]
    compiled = WAYS[way](copy_function(fn))
    start = time.perf_counter()
    with torch.set_grad_enabled(mode == "training"):
        results = compiled(*args)
    if mode == "training":
        torch.autograd.grad(results, args, tangents[: len(results)])
    return time.perf_counter() - start, compiled


@contextmanager
def _stages(into: dict[str, list[float]]) -> Iterator[None]:
    """Records the seconds of each stage of desugar."""

    def record(recording: Recording) -> None:
        sums: dict[str, float] = defaultdict(float)
        for name, seconds in recording.stages:
            sums[name] += seconds
        sums["the rest"] = recording.seconds - sum(sums.values())
        for name, seconds in sums.items():
            into[name].append(seconds)

    with listen(record):
        yield
