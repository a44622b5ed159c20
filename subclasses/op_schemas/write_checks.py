"""Errors of a mapped in-place op before it has written anything.

A mapped op runs on one inner tensor after the other. If all have one dtype and shape, an op that raises for one raises
for the first, and has written nothing. If they differ, as a number and a count do under ``x.mul_(2.5)``, the op is
tried for the others first. Dtypes and sizes decide whether pointwise ops and copies raise; they are tried on tensors of
one element. Other ops, such as ``index_add_``, are tried on a copy of their targets. A tried op that draws random
numbers gets a separate generator. Ops of other libraries, and collectives, are not tried.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import OpOverload
from subclasses.op_schemas.aliasing import argument, may_overlap
from subclasses.op_schemas.schema import functional_counterpart, op_facts
from subclasses.spec.values import PLAIN


def is_tried_first(op: OpOverload) -> bool:
    """Whether an op of PyTorch writes to tensors and may raise; a tried collective would send another message."""
    return (
        bool(op_facts(op).written)
        and op.namespace == "aten"
        and (torch.Tag.nondeterministic_seeded not in op.tags or _is_filled_at_random(op))
        and op is not torch.ops.aten.zero_.default
    )


@functools.cache
def _is_filled_at_random(op: OpOverload) -> bool:
    """Whether an op fills its tensor from a generator that can be passed, as ``normal_`` does."""
    names = [a.name for a in op_facts(op).arguments]
    return names[0] == "self" and names[-1] == "generator" and op_facts(op).written == (0,)


@functools.cache
def _needs_one_element(op: OpOverload) -> bool:
    """Whether dtypes and sizes decide if an op raises."""
    if _is_filled_at_random(op):
        return True
    functional = functional_counterpart(op) or op
    return torch.Tag.pointwise in (*op.tags, *functional.tags) or op is torch.ops.aten.copy_.default


def differ(first: Any, other: Any) -> bool:
    """Whether an op may raise for an inner tensor and not for the first: it has another dtype, shape or overlap.

    Traced inner tensors are not compared, since the comparison would guard on them.
    """
    return (
        other.__class__ in PLAIN
        and first.__class__ in PLAIN
        and (other.dtype is not first.dtype or other.shape != first.shape or may_overlap(other))
    )


def try_first(cls: Any, op: OpOverload, names: tuple[str, ...], args: Any, kwargs: Any) -> None:
    """Tries an op for the inner tensors of these names, and raises the op's error for them."""
    if not _needs_one_element(op):
        for name in names:
            _try_on_copies(cls, op, name, args, kwargs)
        return
    # The operands of such an op must expand to the sizes of its targets.
    facts = op_facts(op)
    for name in names:
        inners = [v.__dict__[name] if isinstance(v, cls) else v for v in (*args, *kwargs.values())]
        tensors = [t for t in inners if isinstance(t, Tensor)]
        if not tensors or any(t.__class__ not in PLAIN or t.layout is not torch.strided for t in tensors):
            continue
        small = [one_element(t) if isinstance(t, Tensor) else t for t in inners]
        named = dict(zip(kwargs, small[len(args) :], strict=True))
        if _is_filled_at_random(op):  # the generator of the call is left as it is
            named["generator"] = torch.Generator(tensors[0].device)
        op(*small[: len(args)], **named)
        # The result of out= is resized instead.
        check_sizes(tensors, [inners[i] for i in facts.written if not facts.arguments[i].keyword])


def _try_on_copies(cls: Any, op: OpOverload, name: str, args: Any, kwargs: Any) -> None:
    """Runs an op on the inner tensors of a name, and on copies of its targets."""
    facts = op_facts(op)

    def select(value: Any) -> Any:
        return value.__dict__[name] if isinstance(value, cls) else value

    def replace(value: Any) -> Any:
        return copies.get(id(t := select(value)), t)

    targets = [_map_leaves(select, argument(facts, args, kwargs, i)) for i in facts.written]
    written = [t for value in targets for t in (value if isinstance(value, list | tuple) else [value])]
    if any(t.__class__ not in PLAIN for t in written):
        return
    copies = {id(t): _copy(t) for t in written}
    op(
        *[_map_leaves(replace, value) for value in args],
        **{key: _map_leaves(replace, value) for key, value in kwargs.items()},
    )


def _map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to an argument of an op, or to each element of one that is a list."""
    if isinstance(value, list | tuple):
        return type(value)(_map_leaves(change, element) for element in value)
    return change(value)


def _copy(tensor: Tensor) -> Tensor:
    """Returns a copy of a tensor in which the same elements share memory."""
    if not may_overlap(tensor):
        return tensor.clone()
    once = tuple([slice(0, 1) if step == 0 else slice(None) for step in tensor.stride()])
    return tensor[once].clone().expand(tensor.shape)


def one_element(tensor: Tensor) -> Tensor:
    """Returns a tensor with the dtype, the device and the number of dimensions of another one, and its overlap."""
    small = tensor.new_ones((1,) * tensor.dim())
    if not may_overlap(tensor):
        return small
    return small.expand(
        [1 + (step == 0 and size > 1) for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    )


def check_sizes(tensors: Iterable[Tensor], written: Iterable[Tensor]) -> None:
    """Raises PyTorch's error if a tensor does not expand to the size of one that an op writes to."""
    for target in written:
        for t in tensors:
            if t.shape != target.shape:
                t.expand_as(target)
