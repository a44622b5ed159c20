"""Differentiation of fake tensors, in Python.

PyTorch's engine is in C++. For a gradient on a CUDA device it gets streams from the driver, and raises an error without
one. The nodes of the autograd graph need no stream, and Python can call them. This engine calls them in the order of
the C++ engine. It reduces and converts gradients as `validate_outputs` in `engine.cpp` does. It does not call hooks on
tensors.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

MATERIALIZES = (
    "_desugar_materializes_grads"  # on a Python function's node: the argument of `set_materialize_grads`
)

Edge = tuple[Any, int]  # a node, and which of its inputs


def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool | None = None,
    **unsupported: Any,
) -> tuple[Tensor | None, ...]:
    """Returns gradients as `torch.autograd.grad` does.

    Args:
        outputs: The results to differentiate.
        inputs: The tensors to differentiate by.
        grad_outputs: The gradient of each output; None means ones.
        retain_graph: Without effect: the graph is kept.
        create_graph: Whether the gradients can be differentiated.
        allow_unused: Whether an input may be one that no output depends on; its gradient is None.
        **unsupported: Other arguments of `torch.autograd.grad`, which have to have their defaults.

    Raises:
        NotImplementedError: An argument is given that this engine does not support.
        RuntimeError: No output depends on an input, and that is not allowed.
    """
    if any(unsupported.values()):
        raise NotImplementedError(
            f"expected outputs, inputs and grad_outputs on a fake device, got {', '.join(unsupported)} too; "
            "call torch.autograd.grad once for each gradient"
        )
    outputs, inputs = ([given] if isinstance(given, Tensor) else list(given) for given in (outputs, inputs))
    given = [None] * len(outputs) if grad_outputs is None else grad_outputs
    given = [given] if isinstance(given, Tensor) else list(given)
    wanted = [_edge_of(x) for x in inputs]
    with torch.set_grad_enabled(create_graph):
        start = [
            (_edge_of(y), torch.ones_like(y) if g is None else g) for y, g in zip(outputs, given, strict=True)
        ]
        gradients = _run(start, wanted)
    results = tuple(gradients.get(edge) for edge in wanted)
    if not allow_unused and any(result is None for result in results):
        raise RuntimeError(
            "expected inputs that the outputs depend on, got one that was not used; pass allow_unused=True"
        )
    return results


def _edge_of(x: Tensor) -> Edge:
    """Returns the edge to which the gradient of a tensor goes."""
    if x.grad_fn is not None:
        return x.grad_fn, x.output_nr
    return torch.autograd.graph.get_gradient_edge(x)[:2]


def _run(start: Iterable[tuple[Edge, Tensor]], wanted: Sequence[Edge]) -> dict[Edge, Tensor]:
    """Runs the nodes between the start and the wanted edges, those made last first; returns the gradients there."""
    start = list(start)
    needed = _nodes_towards({edge[0] for edge, _ in start}, {edge[0] for edge in wanted})
    gradients: dict[Any, dict[int, Tensor]] = {}
    ready: list[tuple[int, int, Any]] = []
    results: dict[Edge, Tensor] = {}
    numbers = itertools.count()  # of nodes made at once, the first that is met runs first

    def add(edge: Edge, value: Tensor) -> None:
        node, number = edge
        if node not in needed:
            return
        if node not in gradients:
            heapq.heappush(ready, (-_order(node), next(numbers), node))
        slots = gradients.setdefault(node, {})
        value = _fit(value, node, number)
        slots[number] = slots[number] + value if number in slots else value

    for edge, value in start:
        add(edge, value)
    while ready:
        node = heapq.heappop(ready)[2]
        slots = gradients.pop(node)
        results |= {edge: slots[edge[1]] for edge in wanted if edge[0] is node and edge[1] in slots}
        if needed[node]:
            for edge, value in _apply(node, slots):
                add(edge, value)
    return results


def _nodes_towards(roots: set[Any], targets: set[Any]) -> dict[Any, bool]:
    """Returns the nodes from which a target is reached, targets included, and whether a target lies behind each."""
    behind: dict[Any, bool] = {}
    stack = [(root, False) for root in roots]
    visited = set()
    while stack:
        node, is_done = stack.pop()
        following = [following for following, _ in node.next_functions if following is not None]
        if is_done:
            behind[node] = any(behind.get(one) or one in targets for one in following)
        elif node not in visited:
            visited.add(node)
            stack.append((node, True))
            stack += [(one, False) for one in following if one not in visited]
    return {node: further for node, further in behind.items() if further or node in targets}


def _order(node: Any) -> int:
    """Returns when a node was made; gradients of leaves come last."""
    return -1 if node.name().endswith("AccumulateGrad") else node._sequence_nr()


def _fit(value: Tensor, node: Any, number: int) -> Tensor:
    """Returns a gradient in the size and dtype of the tensor that it is for."""
    like = node._input_metadata[number]
    if tuple(value.shape) != tuple(like.shape):
        value = value.sum_to_size(tuple(like.shape))
    return value if value.dtype == like.dtype else value.to(like.dtype)


def _apply(node: Any, slots: dict[int, Tensor]) -> list[tuple[Edge, Tensor]]:
    """Calls a node; returns its results, each with the edge that it goes to."""
    given = [slots.get(number) for number in range(len(node._input_metadata))]
    edges = list(node.next_functions)
    if hasattr(node, "needs_input_grad") and hasattr(node, "_forward_cls"):  # an autograd function in Python
        if getattr(node, MATERIALIZES, True):
            given = [
                _zeros(like) if value is None else value
                for value, like in zip(given, node._input_metadata, strict=True)
            ]
        results = node.apply(*given)
        results = results if isinstance(results, tuple) else (results,)
        results = [
            value for value, is_needed in zip(results, node.needs_input_grad, strict=False) if is_needed
        ]
        edges = [edge for edge in edges if edge[0] is not None]
    else:
        results = node(*given)
        results = results if isinstance(results, tuple) else (results,)
    return [
        (edge, value)
        for edge, value in zip(edges, results, strict=False)
        if edge[0] is not None and value is not None
    ]


def note_materializing(ctx: Any, value: bool) -> None:
    """Replaces `FunctionCtx.set_materialize_grads`, and keeps the value where it can be read."""
    ctx.materialize_grads = value
    setattr(ctx, MATERIALIZES, value)


def _zeros(like: Any) -> Tensor:
    return torch.zeros(tuple(like.shape), dtype=like.dtype, device=like.device)
