"""Calls and graphs by name in the traces of `torch.profiler`.

The first call under a profiler puts names around the graphs of the programs that there are; they stay, at the price of
one test a graph. While no profiler runs, nothing else is in the way of a call of what `desugar.compile` returned, whose
entry asks for one anyway; a program behind `torch.compile` asks itself.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.profiler import record_function

from desugar import _torch as private
from desugar.program import Program
from desugar.wrapper.direct_calls import graph_behind

_here = threading.local()
_named: weakref.WeakSet[Any] = weakref.WeakSet()  # generated functions whose graphs have names
_GRAPH = "compiled_graph"  # what generated text calls a graph; a second one has a number behind it


def is_to_be_named() -> bool:
    """Whether the call in progress has no name yet; asked while a profiler runs."""
    return not getattr(_here, "is_named", False)


def naming_itself(program: Program, name: str, as_it_is: Callable[..., Any]) -> Callable[..., Any]:
    """What runs a program that nobody else looks after: under a profiler, by name."""
    run, profiler, forward_ad = program.run, private.profiler, private.forward_ad

    @functools.wraps(run)
    def named(*leaves: Any) -> Any:
        if forward_ad._current_level >= 0:  # which Dynamo does not guard; a program knows of no tangents
            return as_it_is(*leaves)
        if profiler._is_profiler_enabled and is_to_be_named():
            return call_named(lambda args, kwargs: run(*args), name, (program,), leaves, {})
        return run(*leaves)

    return named


def call_named(
    call: Callable[..., Any],
    name: str,
    programs: Iterable[Program],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Makes a call under the name that a trace is to show."""
    for program in programs:
        name_graphs(program, name)
    _here.is_named = True
    try:
        with record_function(f"desugar: {name}"):
            return call(args, kwargs)
    finally:
        _here.is_named = False


def name_graphs(program: Program, name: str) -> None:
    """Puts names around the compiled graphs of a program, backwards that exist by now included."""
    functions = [("forward", inspect.unwrap(program.run))]
    functions += [("backward", function) for function in _backwards(program)]
    for role, function in functions:
        scope = getattr(function, "__globals__", {})
        if function in _named or _GRAPH not in scope:
            continue
        _named.add(function)
        for key in [key for key in scope if key.startswith(_GRAPH)]:
            scope[key] = _under_name(*graph_behind(scope, key), f"desugar graph: {name}, {role}")


def _backwards(program: Program) -> Iterator[Callable[..., Any]]:
    if program.variants is not None:
        yield from program.variants.table.values()


def _under_name(graph: Callable[..., Any], now: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Calls `now` while no profiler runs, else the whole graph, which has names of its own to tell."""
    profiler = private.profiler

    def named(items: list[Any]) -> Any:
        if not profiler._is_profiler_enabled:
            return now(items)
        with record_function(name):
            return graph(items)

    return named
