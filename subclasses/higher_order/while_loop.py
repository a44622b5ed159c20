"""``while_loop`` that carries or reads wrappers, as a ``while_loop`` over plain tensors.

A leaf of a carried value that the body returns unchanged (offsets, a scale) is loop-invariant, not state: the loop only
reads it, like an additional operand. The carried wrappers therefore keep sharing it, and the result shares it with the
operand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import HigherOrderOperator
from subclasses.errors import one_of
from subclasses.higher_order.branches import (
    Results,
    accept_plain,
    check_not_random,
    clone_aliases,
    infer_results,
    select_leaves,
    trace_graphs,
)
from subclasses.higher_order.values import Operands, Part, deduplicate, describe, unwrap_value, wrap_value
from subclasses.spec.values import is_declared, is_differentiable

Call = Callable[..., Any]


def call_while_loop(
    op: HigherOrderOperator,
    fns: tuple[Call, Call],
    carried: Sequence[Any],
    additional: Sequence[Any],
    **kwargs: Any,
) -> tuple[Any, ...]:
    """Calls ``while_loop`` on the inner tensors of its operands, and is differentiable in the operands.

    Raises:
        TypeError: the body returns values of another class or metadata than it receives, or the condition is a
            wrapper.
    """
    leaves: list[Any] = []
    parts = tuple([unwrap_value(value, leaves) for value in carried])
    loop, results = _find_loop(fns[1], parts, leaves, Operands(additional, carried, differentiable=True))
    if kwargs.get("mutated_arg_indices"):
        kwargs["mutated_arg_indices"] = ",".join(map(str, sorted(results.written)))
    condition = functools.partial(_condition, fns[0])
    body = select_leaves(accept_plain(fns[1], loop.wrap), results, loop.varying)
    call = functools.partial(op, accept_plain(condition, loop.wrap), body, **kwargs)
    plain = [*loop.state, *loop.invariant]
    if results.written:
        outputs = op(
            *trace_graphs(call.args, plain, dynamic_ints=True), *_split_operands(loop, plain), **kwargs
        )
    elif torch.is_grad_enabled() and any(map(_requires_grad, plain)):
        check_not_random(op, call.args, plain)
        outputs = _call_differentiably(call, loop, condition(*carried, *additional))
    else:
        outputs = call(*_split_operands(loop, clone_aliases(plain)))
    return tuple(loop.wrap_carried([*outputs, *loop.invariant]))


def _condition(cond_fn: Call, *values: Any) -> Any:
    result = cond_fn(*values)
    if is_declared(result):
        raise TypeError(
            f"while_loop: expected cond_fn to return a bool or a plain bool tensor of one element, got "
            f"{one_of(type(result))}. Read an inner tensor, or reduce to a plain tensor"
        )
    return result


def _split_operands(loop: Loop, plain: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Splits the plain operands into the state and the loop-invariant operands, as the op takes them."""
    return tuple(plain[: len(loop.state)]), tuple(plain[len(loop.state) :])


# ---- gradients ---------------------------------------------------------------------------------------------


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _call_differentiably(call: Call, loop: Loop, has_iteration: Any) -> list[Any]:
    """Calls the op with PyTorch's derivative, and works around two errors of it (2.13, 2.15).

    For a loop without iterations, PyTorch differentiates the body once. In that case the results are the operands, and
    no gradient may come from the loop. For a carried tensor that does not require grad, PyTorch drops the gradients of
    all iterations but the last.
    """
    plain = [*loop.state, *loop.invariant]
    if not isinstance(has_iteration, Tensor):
        has_iteration = torch.full((), bool(has_iteration), device=next(filter(_requires_grad, plain)).device)

    def detach_unless_run(t: Any) -> Any:
        return torch.where(has_iteration, t, t.detach()) if _requires_grad(t) else t

    state, invariant = _split_operands(loop, clone_aliases([detach_unless_run(t) for t in plain]))
    outputs = call(tuple(map(_make_differentiable, state)), invariant)
    pairs = zip(outputs, loop.state, strict=True)
    return [torch.where(has_iteration, t, before) if _requires_grad(t) else t for t, before in pairs]


def _make_differentiable(t: Any) -> Any:
    if isinstance(t, Tensor) and is_differentiable(t) and not t.requires_grad:
        return t.detach().requires_grad_()
    return t


# ---- operands ----------------------------------------------------------------------------------------------


class Loop:
    """The operands of a loop, for a given set of carried leaves that the body changes.

    Attributes:
        varying: indices of those leaves, in order.
        state: their values before the first iteration.
        invariant: the loop-invariant leaves and the additional operands, identical tensors once.
        slots: for each leaf of the carried values, its slot among the plain operands ``[*state, *invariant]``.
    """

    def __init__(
        self, parts: tuple[Part, ...], leaves: Sequence[Any], additional: Operands, varying: Collection[int]
    ) -> None:
        self._parts, self._additional = parts, additional
        self.varying = sorted(varying)
        self.state = [leaves[n] for n in self.varying]
        fixed = [n for n in range(len(leaves)) if n not in varying]
        self.invariant, slots = deduplicate([*(leaves[n] for n in fixed), *additional.plain])
        slots = [len(self.state) + slot for slot in slots]
        where = dict(zip(self.varying, range(len(self.state)), strict=True))
        where |= dict(zip(fixed, slots[: len(fixed)], strict=True))
        self.slots = [where[n] for n in range(len(leaves))]
        self._additional_slots = slots[len(fixed) :]

    def wrap_carried(self, plain: Sequence[Any]) -> list[Any]:
        """Rebuilds the carried values from plain operands."""
        leaves = iter([plain[slot] for slot in self.slots])
        return [wrap_value(part, leaves) for part in self._parts]

    def wrap(self, plain: Sequence[Any]) -> list[Any]:
        """Rebuilds all arguments of the condition and the body from plain operands."""
        additional = self._additional.wrap([plain[slot] for slot in self._additional_slots])
        return [*self.wrap_carried(plain), *additional]


def _find_loop(
    body_fn: Call, parts: tuple[Part, ...], leaves: Sequence[Any], additional: Operands
) -> tuple[Loop, Results]:
    """Finds the loop with the least state, and the results of its body.

    At first every carried tensor counts as invariant. A leaf that the body changes becomes state, and the body is run
    again, until no further leaf changes.

    Raises:
        TypeError: the body returns other classes or metadata than it receives.
    """
    varying = {n for n, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
    while True:
        loop = Loop(parts, leaves, additional, varying)
        results = infer_results(accept_plain(body_fn, loop.wrap), [*loop.state, *loop.invariant])
        if results.parts != parts:
            given = iter(leaves)
            shown = ", ".join(describe(part, given) for part in parts)
            raise TypeError(
                f"the body of while_loop is given ({shown}) and returns {results}; return values of the same "
                f"structure, classes and metadata"
            )
        changed = {n for n, source in enumerate(results.sources) if source != loop.slots[n]} - varying
        if not changed and (varying or not leaves):
            return loop, results
        varying |= changed or set(range(len(leaves)))
