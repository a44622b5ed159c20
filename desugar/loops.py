"""`while_loop` over tensor subclasses: condition and body are desugared like the branches of a `cond`.

What is carried from one round to the next is carried as plain inner tensors. No gradient flows through such a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from desugar import _torch as private
from desugar.branches import Branch, BranchInputs, describe_results, kind_of, plain_graph, trace_on_operands
from desugar.capture import HIGHER_ORDER, Capture
from desugar.errors import DesugarError
from desugar.values import Plain, describe, slots_of, wrap_value
from desugar.watching import plain_parts


def call_while_loop(
    outer: Capture, cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried: Any, more: Any = ()
) -> Any:
    """`while_loop` in a trace.

    Args:
        outer: The trace that met it.
        cond_fn: Whether to go on, from what is carried and what is not.
        body_fn: What is carried to the next round, from the same.
        carried: Tensors and ints.
        more: Tensors and ints that stay as they are.

    Raises:
        DesugarError: A gradient would have to flow through the loop; the body gives something else than is
            carried; or what either does is not taken.
    """
    leaves = [outer.replace(leaf) for leaf in (*carried, *more)]
    number = len(carried)
    needs_grad = torch.is_grad_enabled() and any(getattr(leaf, "requires_grad", False) for leaf in leaves)
    if needs_grad and not all(isinstance(leaf, private.FunctionalTensor) for leaf in leaves):
        raise DesugarError(
            "a while_loop over a tensor subclass, through which a gradient would have to flow",
            instead="write the loop in Python, or carry the inner tensors",
        )
    if needs_grad or not all(isinstance(leaf, Tensor) for leaf in leaves):
        return private.while_loop_op(cond_fn, body_fn, tuple(leaves[:number]), tuple(leaves[number:]))
    fns = [_on_first(fn, len(leaves)) for fn in (cond_fn, body_fn)]
    (cond, body), inputs = trace_on_operands(outer, fns, _with_own_parts(leaves))
    return _run(cond, body, inputs, number)


HIGHER_ORDER["while_loop"] = call_while_loop


def _on_first(fn: Callable[..., Any], number: int) -> Callable[..., Any]:
    """The function, without the operands that were found to be such."""
    return lambda *leaves: fn(*leaves[:number])


def _with_own_parts(leaves: Sequence[Any]) -> list[Any]:
    """Tensors none of which shares an inner tensor with another: in the next round they may differ."""
    seen: set[int] = set()
    own = []
    for leaf in leaves:
        parts = [id(part) for part in plain_parts(leaf)]
        own.append(leaf.clone() if len({*parts} - seen) < len(parts) else leaf)
        seen.update(parts)
    return own


def _run(cond: Branch, body: Branch, inputs: BranchInputs, number: int) -> tuple[Any, ...]:
    values, results = inputs.values[:number], body.outputs.visible
    check_carried(inputs, number, body)
    slots = [slot for value in values for slot in slots_of(value)]
    order = [*slots, *(slot for slot in range(len(inputs.flat.items)) if slot not in slots)]
    (verdict,) = cond.outputs.visible
    if not isinstance(verdict, Plain):
        raise DesugarError(
            f"the condition of a while_loop gives {describe(verdict)}",
            instead="give a plain bool tensor of one element",
        )
    graphs = (
        plain_graph(cond, [verdict.index], order, alone=True),
        plain_graph(body, [slot for value in results for slot in slots_of(value)], order),
    )
    items = [inputs.flat.items[slot] for slot in order]
    with private.BelowAutograd():
        found = private.while_loop_op(*graphs, tuple(items[: len(slots)]), tuple(items[len(slots) :]))
    after = dict(zip(slots, found, strict=True))
    flat = [after.get(slot, item) for slot, item in enumerate(inputs.flat.items)]
    return tuple(wrap_value(value, flat) for value in values)


def check_carried(inputs: BranchInputs, number: int, body: Branch) -> None:
    """Raises `DesugarError` unless the body gives what it takes: as many, of the same types, sizes and dtypes."""
    before = [kind_of(value, inputs.primals()) for value in inputs.values[:number]]
    after = [kind_of(value, body.outputs.items) for value in body.outputs.visible]
    if before != after:
        gets = ", ".join(describe(value, "", inputs.primals()) for value in inputs.values[:number])
        gives = describe_results(body)
        raise DesugarError(
            f"the body of a while_loop gives something else than it gets:\n  gets: {gets}\n  gives: {gives}",
            instead="carry tensors of the same structure, types, sizes, strides and dtypes from round to round",
        )
