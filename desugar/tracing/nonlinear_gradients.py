"""Finds custom autograd functions whose backward may not be linear in the incoming gradients.

Autograd's own formulas are linear. So the backward graph for all incoming gradients also determines the result for
a subset of them. The backward of a `torch.autograd.Function` may compute anything:

- An auxiliary loss is often implemented as a function whose `backward` returns a constant. The constant counts only
  where that `backward` runs.
- A function with several results may test which of their gradients arrive. A graph traced with all gradients does
  not contain what it computes for fewer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, fx
from torch.autograd.function import BackwardCFunction

from desugar.ir.fx_utils import autograd_nodes, output_nodes, set_outputs, tangent_dependencies
from desugar.ir.stages import GradientCall
from desugar.ir.values import Flat, unwrap_value
from desugar.tracing.run import from_functional


@contextlib.contextmanager
def record_backward_calls(results: Sequence[Tensor]) -> Iterator[list[GradientCall]]:
    """Records each call of a Python autograd function's backward, with the plain tensors of its gradients.

    For a single result it records nothing: without that result's gradient no backward runs.

    Args:
        results: The tensors whose autograd graph is watched.
    """
    calls: list[GradientCall] = []
    nodes = autograd_nodes(results) if len(results) > 1 else ()
    handles = []
    for node in nodes:
        if isinstance(node, BackwardCFunction):
            is_linear = node._forward_cls.__module__.startswith("subclasses.")  # type: ignore[attr-defined]

            def record(given: Any, arriving: Any, is_linear: bool = is_linear) -> None:
                arriving_parts = () if is_linear else _plain_tensors(arriving)
                calls.append(GradientCall(arriving_parts, _plain_tensors(given)))

            handles.append(node.register_hook(record))  # type: ignore[attr-defined]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _plain_tensors(gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], ...]:
    """Returns the plain tensors of each gradient that is not None."""
    flats = []
    for gradient in gradients:
        if gradient is not None:
            flats.append(Flat())
            unwrap_value(gradient, flats[-1])
    return tuple([from_functional(item) for item in flat.items if isinstance(item, Tensor)] for flat in flats)


def recorded_tensors(calls: Sequence[GradientCall]) -> list[Tensor]:
    """Returns all plain tensors of the recorded calls as one flat list."""
    return [tensor for call in calls for part in (*call.received, *call.returned) for tensor in part]


def resolve_calls(graph: fx.GraphModule, calls: Sequence[GradientCall]) -> tuple[GradientCall, ...]:
    """Returns the recorded calls with the tangent slots that each gradient depends on in place of its tensors.

    Args:
        graph: The joint graph. Its last outputs are the recorded tensors; they are removed from it.
        calls: The recorded calls, with plain tensors.
    """
    count = len(recorded_tensors(calls))
    if count == 0:
        return ()
    outputs, behind = output_nodes(graph), tangent_dependencies(graph)
    recorded = iter(outputs[-count:])

    def slots(parts: Sequence[Sequence[Tensor]]) -> tuple[frozenset[int], ...]:
        return tuple(
            frozenset().union(*(behind.get(next(recorded), frozenset()) for _ in part)) for part in parts
        )

    resolved = tuple(GradientCall(slots(call.received), slots(call.returned)) for call in calls)
    set_outputs(graph, outputs[:-count])
    return resolved


def may_differ_without(calls: Sequence[GradientCall], missing: frozenset[int]) -> bool:
    """Whether a recorded backward may compute something else when the tangent slots `missing` do not arrive.

    True if an output of a call depends on no tangent, or if only some of a call's incoming gradients are missing.
    """
    has_constant_output = any(not slots for call in calls for slots in call.returned)
    return has_constant_output or any(
        len({slots <= missing for slots in call.received if slots}) > 1 for call in calls
    )
