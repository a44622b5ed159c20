"""Calls the code inside Inductor's graphs, and backwards, without the layers around them.

Calling a `CompiledFxGraph` finishes the autotuning of its compilation, checks for debugging tools and for a profiler,
which costs 0.7 µs. Only the first call needs to finish autotuning. A runtime wrapper does not need the debugging tools.
The top of the call has checked for a profiler already. So only the first call of a graph, and each call under a
profiler, goes through the `CompiledFxGraph` (see :mod:`desugar.dynamo.profiling`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from desugar import _torch as torch_private

Graph = Callable[[list[Any]], Sequence[Any]]


class FirstCall:
    """A compiled graph that replaces itself in a runtime wrapper's globals by the code inside it, after its first call.

    Attributes:
        graph: The compiled graph.
        inside: The code inside the graph.
    """

    def __init__(self, graph: Graph, inside: Graph, scope: dict[str, Any], name: str) -> None:
        self.graph, self.inside = graph, inside
        self._scope, self._name = scope, name

    def __call__(self, items: list[Any]) -> Sequence[Any]:
        """Runs the graph; its next call is direct."""
        results = self.graph(items)
        if self._scope.get(self._name) is self:
            self._scope[self._name] = self.inside
        return results


def call_directly(function: Any) -> None:
    """Makes a generated function call the code inside its graphs from their second call on.

    Args:
        function: A function that reads each graph from a global name. Its globals keep the graphs alive, since the
            deletion of a graph deletes the code inside.
    """
    scope = function.__globals__
    for name, graph in list(scope.items()):
        if _is_inductor_graph(graph) and graph.current_callable is not None:
            scope[name] = scope[_graph_name(name)] = FirstCall(graph, graph.current_callable, scope, name)


def replace_backward(function: Any, variant: Callable[..., Any]) -> None:
    """Makes autograd call `variant(ctx, *tangents)` as the backward of an autograd function.

    Args:
        function: The autograd function. By default, its node chooses at each call between `backward` and `vjp`, and
            the form of the gradients. Here the variant becomes the node's own method.
        variant: Computes the gradients.
    """
    function.backward = staticmethod(variant)
    function._backward_cls.apply = variant


def graph_behind(scope: dict[str, Any], name: str) -> tuple[Graph, Graph]:
    """Returns the graph behind a global name of a runtime wrapper, and the callable that the name refers to now."""
    first = scope.get(_graph_name(name))
    return (first.graph if isinstance(first, FirstCall) else scope[name]), scope[name]


def _is_inductor_graph(graph: Any) -> bool:
    # Does not import Inductor for this test.
    return "torch._inductor.output_code" in sys.modules and isinstance(graph, torch_private.CompiledFxGraph)


def _graph_name(name: str) -> str:
    """Returns the global name that keeps the graph alive."""
    return f"_{name}"
