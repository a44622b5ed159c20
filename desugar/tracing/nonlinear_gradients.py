"""Gradients of autograd functions that are not linear in the gradients that arrive.

Autograd's own formulas are linear, so the graph for all gradients tells what some of them give. An
`autograd.Function` may give anything: a loss on the side is often brought in by one whose `backward` returns a
constant, which counts exactly where that `backward` runs, and one with several results may look which of their
gradients are there. What it does with fewer of them is not in a graph that had all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, fx
from torch.autograd.function import BackwardCFunction

from desugar.ir.fx_utils import autograd_nodes, output_nodes, set_outputs, tangents_behind
from desugar.ir.stages import GradientCall
from desugar.ir.values import Flat, unwrap_value
from desugar.tracing.run import plain


@contextlib.contextmanager
def noting_calls(results: Sequence[Tensor]) -> Iterator[list[GradientCall]]:
    """Inside, backwards of Python's autograd functions are noted, with the plain tensors of each gradient.

    Where there is one result, its gradient is there or no backward is run.
    """
    calls: list[GradientCall] = []
    nodes = autograd_nodes(results) if len(results) > 1 else ()
    handles = []
    for node in nodes:
        if isinstance(node, BackwardCFunction):
            is_linear = node._forward_cls.__module__.startswith("subclasses.")  # type: ignore[attr-defined]

            def note(given: Any, arriving: Any, is_linear: bool = is_linear) -> None:
                calls.append(GradientCall(() if is_linear else _parts(arriving), _parts(given)))

            handles.append(node.register_hook(note))  # type: ignore[attr-defined]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _parts(gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], ...]:
    flats = []
    for gradient in gradients:
        if gradient is not None:
            flats.append(Flat())
            unwrap_value(gradient, flats[-1])
    return tuple([plain(item) for item in flat.items if isinstance(item, Tensor)] for flat in flats)


def tensors_of(calls: Sequence[GradientCall]) -> list[Tensor]:
    """All that was noted, flat."""
    return [tensor for call in calls for part in (*call.arriving, *call.given) for tensor in part]


def take_calls(graph: fx.GraphModule, calls: Sequence[GradientCall]) -> tuple[GradientCall, ...]:
    """The noted calls, with the tangent slots that each gradient is computed from.

    Args:
        graph: A joint graph, which returns all noted tensors last; they are taken out of it.
        calls: What was noted.
    """
    count = len(tensors_of(calls))
    if count == 0:
        return ()
    outputs, behind = output_nodes(graph), tangents_behind(graph)
    noted = iter(outputs[-count:])

    def slots(parts: Sequence[Sequence[Tensor]]) -> tuple[frozenset[int], ...]:
        return tuple(
            frozenset().union(*(behind.get(next(noted), frozenset()) for _ in part)) for part in parts
        )

    found = tuple(GradientCall(slots(call.arriving), slots(call.given)) for call in calls)
    set_outputs(graph, outputs[:-count])
    return found


def may_give_else(calls: Sequence[GradientCall], missing: frozenset[int]) -> bool:
    """Whether one of the functions may give something else when these tangent slots do not arrive.

    It may if it gives what no gradient has a part in, or got some of its gradients and now gets fewer.
    """
    unfed = any(not slots for call in calls for slots in call.given)
    return unfed or any(len({slots <= missing for slots in call.arriving if slots}) > 1 for call in calls)
