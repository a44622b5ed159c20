"""Measures the cost of a program's calls: of the user's calls, or of calls made for the measurement."""

from __future__ import annotations

import functools
import inspect
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import SymInt, Tensor

from desugar.explain.records import Cost
from desugar.ir.abstract_values import hint
from desugar.ir.stages import Outputs
from desugar.program import Program

_GRAPH = "compiled_graph"  # the name of the forward or inference graph in generated text

_SECONDS, _LEAST = 0.4, 6
_SAMPLES = 1000  # calls of one program whose times a meter stores


def measure_cost(program: Program, outputs: Outputs, given: Sequence[Any]) -> Cost | str:
    """Returns the cost of a call of a program with the leaves that it was compiled for, or why it is not measured.

    The program runs many times, and its later calls are measured, too. The state of random generators is restored.
    """
    if outputs.has_effects:
        return "it writes to its arguments, and a measurement calls it many times"
    leaves = [hint(leaf) if isinstance(leaf, SymInt) else leaf for leaf in given]
    on_cuda = any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves)
    meter = attach_meter(program, torch.cuda.synchronize if on_cuda else lambda: None)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    end = time.perf_counter() + _SECONDS
    with torch.random.fork_rng(devices=devices):
        while meter.calls < _LEAST or (time.perf_counter() < end and meter.calls < _SAMPLES):
            program.run(*leaves)
    return meter.cost or "it was not called"


@dataclass(slots=True)
class Meter:
    """Seconds of the calls of one program, and of the graph in each."""

    calls: int = 0
    whole: list[float] = field(default_factory=list)
    graph: list[float] = field(default_factory=list)
    last_graph: float = 0.0

    @property
    def cost(self) -> Cost | None:
        """The median cost of the calls; the first call is left out if there are others.

        The wrapper's time is the median of the differences, call by call. The difference of two medians would compare
        two calls. On a busy machine, or if sizes vary, two calls differ by more than a wrapper.
        """
        whole, graph = (times[1:] or times for times in (self.whole, self.graph))
        if not whole:
            return None
        call = statistics.median(whole)
        wrapper = statistics.median(one - inside for one, inside in zip(whole, graph, strict=True))
        return Cost(call, min(max(call - wrapper, 0.0), call), len(whole))


def attach_meter(program: Any, wait: Callable[[], None] = lambda: None) -> Meter:
    """Counts and times the calls of a program from now on.

    Args:
        program: The program.
        wait: Called before each reading of the clock, such as `torch.cuda.synchronize`.
    """
    meter, run, scope = Meter(), program.run, inspect.unwrap(program.run).__globals__
    compiled = scope.get(_GRAPH)

    @functools.wraps(run)
    def metered(*leaves: Any) -> Any:
        meter.last_graph, start = 0.0, time.perf_counter()
        result = run(*leaves)
        wait()
        meter.calls += 1
        if len(meter.whole) < _SAMPLES:
            meter.whole.append(time.perf_counter() - start)
            meter.graph.append(meter.last_graph)
        return result

    def timed(items: list[Any]) -> Any:
        start = time.perf_counter()
        try:
            return compiled(items)
        finally:
            wait()
            meter.last_graph += time.perf_counter() - start

    if compiled is not None:
        scope[_GRAPH] = timed
    program.run = metered
    return meter
