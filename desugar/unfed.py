"""Gradients that come from no gradient.

Autograd's own formulas are linear in the gradients that arrive. An `autograd.Function` may give anything: a loss on
the side is often brought in by a function whose `backward` returns a constant. Such a gradient counts exactly where
that `backward` runs, which a graph of tensors does not tell: nothing in it leads from an arriving gradient there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, fx
from torch.autograd.function import BackwardCFunction

from desugar.graphs import autograd_nodes, output_nodes, set_outputs
from desugar.runs import plain
from desugar.values import Flat, unwrap_value


@contextlib.contextmanager
def noting_given(results: Sequence[Tensor]) -> Iterator[list[list[Tensor]]]:
    """Inside, what Python's autograd functions give as gradients is noted: the plain tensors of each.

    Which of several results a function belongs to matters only where there are several.
    """
    given: list[list[Tensor]] = []

    def note(gradients: tuple[Tensor | None, ...], _: Any) -> None:
        for gradient in gradients:
            if gradient is not None:
                flat = Flat()
                unwrap_value(gradient, flat)
                given.append([plain(item) for item in flat.items if isinstance(item, Tensor)])

    nodes = autograd_nodes(results) if len(results) > 1 else ()
    handles = [node.register_hook(note) for node in nodes if isinstance(node, BackwardCFunction)]
    try:
        yield given
    finally:
        for handle in handles:
            handle.remove()


def take_unfed(graph: fx.GraphModule, given: Sequence[Sequence[Tensor]]) -> bool:
    """Whether one of the noted gradients is computed from no tangent.

    Args:
        graph: A joint graph, which returns all noted tensors last; they are taken out of it.
        given: What was noted.
    """
    count = sum(map(len, given))
    if count == 0:
        return False
    outputs = output_nodes(graph)
    fed = set[fx.Node]()
    for node in graph.graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if is_tangent or any(parent in fed for parent in node.all_input_nodes):
            fed.add(node)
    noted = iter(outputs[-count:])
    groups = [[next(noted) for _ in group] for group in given]
    set_outputs(graph, outputs[:-count])
    return any(group and not any(node in fed for node in group) for group in groups)
