"""``while_loop`` over plain tensors, from one that carries or reads wrappers.

A leaf of a carried value that the body returns as it is (offsets, a scale) is no state of the loop: it is read, like
an additional operand. So the wrappers that are carried go on sharing it, and the result shares it with the operand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import HigherOrderOperator
from subclasses.autograd.construct import is_differentiable
from subclasses.errors import one_of
from subclasses.higher_order.branches import (
    Results,
    apart,
    as_graphs,
    check_not_random,
    find_results,
    over_plain,
    plain_function,
)
from subclasses.higher_order.values import (
    Operands,
    Part,
    describe,
    is_declared,
    unwrap_value,
    without_repetition,
    wrap_value,
)

Call = Callable[..., Any]


def call_while_loop(
    op: HigherOrderOperator,
    fns: tuple[Call, Call],
    carried: Sequence[Any],
    additional: Sequence[Any],
    **kwargs: Any,
) -> tuple[Any, ...]:
    """Calls ``while_loop`` on the inner tensors of its operands; differentiable in the operands.

    Raises:
        TypeError: the body returns values of another class or metadata than it is given, or the condition is
            a wrapper.
    """
    leaves: list[Any] = []
    parts = tuple([unwrap_value(value, leaves) for value in carried])
    loop, results = _find_loop(fns[1], parts, leaves, Operands(additional, carried, differentiable=True))
    if kwargs.get("mutated_arg_indices"):
        kwargs["mutated_arg_indices"] = ",".join(map(str, sorted(results.written)))
    condition = functools.partial(_condition, fns[0])
    body = plain_function(over_plain(fns[1], loop.wrap), results, loop.varying)
    call = functools.partial(op, over_plain(condition, loop.wrap), body, **kwargs)
    plain = [*loop.state, *loop.read]
    if results.written:
        found = op(*as_graphs(call.args, plain, dynamic_ints=True), *_in_two(loop, plain), **kwargs)
    elif torch.is_grad_enabled() and any(map(_requires_grad, plain)):
        check_not_random(op, call.args, plain)
        found = _call_differentiably(call, loop, condition(*carried, *additional))
    else:
        found = call(*_in_two(loop, apart(plain)))
    return tuple(loop.wrap_carried([*found, *loop.read]))


def _condition(cond_fn: Call, *values: Any) -> Any:
    found = cond_fn(*values)
    if is_declared(found):
        raise TypeError(
            f"while_loop: expected cond_fn to return a bool or a plain bool tensor of one element, got "
            f"{one_of(type(found))}; read an inner tensor, or reduce to a plain tensor"
        )
    return found


def _in_two(loop: Loop, plain: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The state and what is read besides, as the op takes them."""
    return tuple(plain[: len(loop.state)]), tuple(plain[len(loop.state) :])


# ---- gradients ---------------------------------------------------------------------------------------------


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _call_differentiably(call: Call, loop: Loop, starts: Any) -> list[Any]:
    """Calls the op with PyTorch's derivative, kept from what that gets wrong (2.13, 2.15).

    It differentiates the body once for a loop that makes no iteration: there results are the operands, and no
    gradient comes from the loop. It forgets all iterations but the last for a carried tensor that requires no grad.
    """
    plain = [*loop.state, *loop.read]
    if not isinstance(starts, Tensor):
        starts = torch.full((), bool(starts), device=next(filter(_requires_grad, plain)).device)

    def where_it_starts(t: Any) -> Any:
        return torch.where(starts, t, t.detach()) if _requires_grad(t) else t

    state, read = _in_two(loop, apart([where_it_starts(t) for t in plain]))
    found = call(tuple(map(_requiring_grad, state)), read)
    pairs = zip(found, loop.state, strict=True)
    return [torch.where(starts, t, before) if _requires_grad(t) else t for t, before in pairs]


def _requiring_grad(t: Any) -> Any:
    if isinstance(t, Tensor) and is_differentiable(t) and not t.requires_grad:
        return t.detach().requires_grad_()
    return t


# ---- operands ----------------------------------------------------------------------------------------------


class Loop:
    """The operands of a loop, given which leaves of the carried values the body changes.

    Attributes:
        varying: those leaves.
        state: what they are before the first iteration.
        read: the other leaves and the additional operands, identical tensors once.
    """

    def __init__(
        self, parts: tuple[Part, ...], leaves: Sequence[Any], additional: Operands, varying: Collection[int]
    ) -> None:
        self._parts, self._additional = parts, additional
        self.varying = sorted(varying)
        self.state = [leaves[n] for n in self.varying]
        kept = [n for n in range(len(leaves)) if n not in varying]
        self.read, places = without_repetition([*(leaves[n] for n in kept), *additional.plain])
        places = [len(self.state) + place for place in places]
        where = dict(zip(self.varying, range(len(self.state)), strict=True))
        where |= dict(zip(kept, places[: len(kept)], strict=True))
        self.places = [where[n] for n in range(len(leaves))]
        self._additional_places = places[len(kept) :]

    def wrap_carried(self, plain: Sequence[Any]) -> list[Any]:
        """The carried values, around plain operands."""
        leaves = iter([plain[place] for place in self.places])
        return [wrap_value(part, leaves) for part in self._parts]

    def wrap(self, plain: Sequence[Any]) -> list[Any]:
        """All arguments of the condition and the body, around plain operands."""
        additional = self._additional.wrap([plain[place] for place in self._additional_places])
        return [*self.wrap_carried(plain), *additional]


def _find_loop(
    body_fn: Call, parts: tuple[Part, ...], leaves: Sequence[Any], additional: Operands
) -> tuple[Loop, Results]:
    """The loop with the least state, and what its body returns.

    At first every tensor counts as unchanged; one that the body does not return as it is becomes state, and the body
    is asked again, until it confirms what was assumed.
    """
    varying = {n for n, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
    while True:
        loop = Loop(parts, leaves, additional, varying)
        results = find_results(over_plain(body_fn, loop.wrap), [*loop.state, *loop.read])
        if results.parts != parts:
            given = iter(leaves)
            shown = ", ".join(describe(part, given) for part in parts)
            raise TypeError(
                f"the body of while_loop is given ({shown}) and returns {results}; return values of the same "
                f"structure, classes and metadata"
            )
        changed = {n for n, source in enumerate(results.sources) if source != loop.places[n]} - varying
        if not changed and (varying or not leaves):
            return loop, results
        varying |= changed or set(range(len(leaves)))
