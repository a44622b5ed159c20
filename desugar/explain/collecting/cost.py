"""The cost of calls of a program: measured in turns with the graph alone, or metered in the user's calls."""

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
from desugar.flatten.fakes import hint
from desugar.ir.outputs import Outputs
from desugar.program import Program

_GRAPH = "compiled_graph"  # the name of the forward or inference graph in generated text

_SECONDS, _LEAST, _MOST = 0.2, 5, 2000
_SAMPLES = 1000  # calls of one program whose times a meter stores


def measure_cost(program: Program, outputs: Outputs, given: Sequence[Any]) -> Cost | str:
    """The cost of a call of a program with the leaves that it was made for, or why it is not measured.

    The program is run many times; random numbers go on afterwards as if it had not been.
    """
    run = program.run
    scope = inspect.unwrap(run).__globals__
    if outputs.has_effects:
        return "it writes to its arguments, and a measurement calls it many times"
    if _GRAPH not in scope:
        return "it calls no graph"
    compiled, taken = scope[_GRAPH], []
    leaves = [hint(leaf) if isinstance(leaf, SymInt) else leaf for leaf in given]

    def take(items: list[Any]) -> Any:
        taken.append(list(items))
        return compiled(items)

    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        scope[_GRAPH] = take
        try:
            run(*leaves)
        finally:
            scope[_GRAPH] = compiled
        if not taken:
            return "it calls no graph"
        return _take_turns(lambda: run(*leaves), _graph_alone(compiled, taken[0], program), taken[0])


def _graph_alone(compiled: Any, items: list[Any], program: Program) -> Callable[[], Any]:
    if program.variants is None:
        return lambda: compiled(list(items))

    def run() -> Any:  # as inside of an autograd function
        with torch.no_grad():
            return compiled(list(items))

    return run


def _take_turns(call: Callable[[], Any], graph: Callable[[], Any], items: list[Any]) -> Cost:
    on_cuda = any(isinstance(item, Tensor) and item.is_cuda for item in items)
    times: tuple[list[float], list[float]] = ([], [])
    call()
    graph()
    end = time.perf_counter() + _SECONDS
    while len(times[0]) < _LEAST or (time.perf_counter() < end and len(times[0]) < _MOST):
        for run, spent in zip((call, graph), times, strict=True):
            if on_cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            spent.append(time.perf_counter() - start)
    return _middle_cost(*times)


def _middle_cost(whole: Sequence[float], graph: Sequence[float]) -> Cost:
    """The median cost of a call and of its wrapper.

    The wrapper's part is the median of the differences, call by call: the difference of two medians would be that
    of two calls, which differ by more than a wrapper where the machine is busy or sizes vary.
    """
    call = statistics.median(whole)
    wrapper = statistics.median(one - inside for one, inside in zip(whole, graph, strict=True))
    return Cost(call, min(max(call - wrapper, 0.0), call), len(whole))


# ---------------------------------------------------------------------------------------------------- metering


@dataclass(slots=True)
class Meter:
    """Seconds of the calls of one program, and of the graph in each."""

    calls: int = 0
    whole: list[float] = field(default_factory=list)
    graph: list[float] = field(default_factory=list)
    last_graph: float = 0.0

    @property
    def cost(self) -> Cost | None:
        """Medians, without the first call where there are others."""
        whole, graph = (times[1:] or times for times in (self.whole, self.graph))
        return _middle_cost(whole, graph) if whole else None


def attach_meter(program: Any) -> Meter:
    """Counts and times the calls of a program from now on."""
    meter, run, scope = Meter(), program.run, inspect.unwrap(program.run).__globals__
    compiled = scope.get(_GRAPH)

    @functools.wraps(run)
    def metered(*leaves: Any) -> Any:
        meter.last_graph, start = 0.0, time.perf_counter()
        result = run(*leaves)
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
            meter.last_graph += time.perf_counter() - start

    if compiled is not None:
        scope[_GRAPH] = timed
    program.run = metered
    return meter
