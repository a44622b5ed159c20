"""Graphs of Inductor's, and backwards, called without what surrounds them.

Calling a `CompiledFxGraph` ends the autotuning of its compilation, asks whether debugging tools listen and looks
for a profiler, which costs 0.7 µs. The first of these is work for the first call alone, the second is none of a
wrapper's business, and the third was asked at the top of the call. So only the first call of a graph, and each
under a profiler, goes that way (see :mod:`desugar.dynamo.profiling`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from desugar import _torch as private

Graph = Callable[[list[Any]], Sequence[Any]]


class FirstCall:
    """A compiled graph that, once it was called, gives its name in a wrapper's globals to the code inside it."""

    def __init__(self, graph: Graph, inside: Graph, scope: dict[str, Any], name: str) -> None:
        self.graph, self.inside = graph, inside
        self._scope, self._name = scope, name

    def __call__(self, items: list[Any]) -> Sequence[Any]:
        """Runs the graph, whose next call will be direct."""
        results = self.graph(items)
        if self._scope.get(self._name) is self:
            self._scope[self._name] = self.inside
        return results


def call_directly(function: Any) -> None:
    """Has a generated function call the code inside its graphs from their second call on.

    Args:
        function: It reaches each graph by a global name. The graphs stay alive with it, for their deletion takes
            apart what is inside.
    """
    scope = function.__globals__
    for name, graph in list(scope.items()):
        if _is_inductors(graph) and graph.current_callable is not None:
            scope[name] = scope[_owner(name)] = FirstCall(graph, graph.current_callable, scope, name)


def take_place_of_backward(function: Any, variant: Callable[..., Any]) -> None:
    """Has autograd call `variant(ctx, *tangents)` for an autograd function.

    Args:
        function: The autograd function. Its node asks at each call whether `backward` or `vjp` is the one, and in
            which form it takes gradients; the variant is the node's own method instead.
        variant: What computes the gradients.
    """
    function.backward = staticmethod(variant)
    function._backward_cls.apply = variant


def graph_behind(scope: dict[str, Any], name: str) -> tuple[Graph, Graph]:
    """The graph that a wrapper calls by a global name, as a whole and as it is called now."""
    first = scope.get(_owner(name))
    return (first.graph if isinstance(first, FirstCall) else scope[name]), scope[name]


def _is_inductors(graph: Any) -> bool:
    # Inductor is not imported for the sake of asking.
    return "torch._inductor.output_code" in sys.modules and isinstance(graph, private.CompiledFxGraph)


def _owner(name: str) -> str:
    return f"_{name}"
