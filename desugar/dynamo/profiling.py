"""Names calls and graphs in the traces of `torch.profiler`.

The first call under a profiler wraps the graphs of the existing programs in functions that name them. The wrappers
stay, and cost one test per graph call. Without a profiler, a call of a `desugar.compile` callable has no other cost,
because its entry tests for a profiler in any case. A program that `torch.compile` calls tests for a profiler itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch.profiler import record_function

from desugar import _torch as torch_private
from desugar.codegen.direct_calls import graph_behind
from desugar.program import Program

# The global name of a graph in generated text; a second graph has a number as suffix.
_GRAPH = "compiled_graph"


def with_profiler_name(program: Program, name: str, uncompiled: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs a program, and names the call if a profiler runs.

    Args:
        program: A program that `torch.compile` calls, without an entry of `desugar.compile`.
        name: The name of the call.
        uncompiled: Dynamo's graph, which runs in place of the program under forward-mode differentiation.
    """
    run, profiler, forward_ad = program.run, torch_private.profiler, torch_private.forward_ad

    @functools.wraps(run)
    def named(*leaves: Any) -> Any:
        # Dynamo does not guard the level of forward-mode differentiation, and a program ignores its tangents.
        if forward_ad._current_level >= 0:
            return uncompiled(*leaves)
        if profiler._is_profiler_enabled:
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
    """Calls `call(args, kwargs)` under a name in the profiler's trace, and names the graphs of the programs."""
    for program in programs:
        name_graphs(program, name)
    with record_function(f"desugar: {name}"):
        return call(args, kwargs)


def name_graphs(program: Program, name: str) -> None:
    """Names the compiled graphs of a program, including its existing backwards, in the profiler's trace."""
    backwards = () if program.variants is None else program.variants.table.values()
    functions = [("forward", inspect.unwrap(program.run)), *(("backward", made) for made in backwards)]
    for role, function in functions:
        scope = getattr(function, "__globals__", {})
        keys = [key for key in scope if key.startswith(_GRAPH)]
        for key in [key for key in keys if not hasattr(scope[key], "is_named")]:
            scope[key] = _with_name(*graph_behind(scope, key), f"desugar graph: {name}, {role}")


def _with_name(graph: Callable[..., Any], current: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns a function that runs a graph, under a name if a profiler runs.

    Args:
        graph: The compiled graph, which itself names its parts for a profiler. It runs under a profiler.
        current: The wrapper's present callee: the code inside the graph, or a callable that replaces itself by that
            code after its first call. It runs without a profiler.
        name: The name.
    """
    profiler = torch_private.profiler

    def named(items: list[Any]) -> Any:
        if not profiler._is_profiler_enabled:
            return current(items)
        with record_function(name):
            return graph(items)

    named.is_named = True  # type: ignore[attr-defined]
    return named
