"""Collectives on distributed parameters: they send the int8 numbers, and a scale for each row.

``DTensor.full_tensor`` and the full state dicts of `torch.distributed.checkpoint` use them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from subclasses._torch_distributed import joint_work
from subclasses.autograd.engine_ops import check_no_cotangents
from subclasses.errors import DispatchError, one_of
from subclasses.int8.parts import map_parts, with_row_blocks
from subclasses.int8.tensor import Int8Tensor
from subclasses.op_schemas.aliasing import bump_versions

aten = torch.ops.aten

# ---- padding -----------------------------------------------------------------------------------------------


@Int8Tensor.implements(aten.constant_pad_nd.default)
def _(func: Any, x: Any, pad: Sequence[int], value: Any = 0) -> Any:
    """Appends or prepends rows of zeros, as ``DTensor`` does with shards of uneven size; else pads a plain tensor."""
    check_no_cotangents(Int8Tensor, func, [x])
    within, along = list(pad[: 2 * (x.dim() - 1)]), list(pad[2 * (x.dim() - 1) :])
    if value != 0 or any(within) or x.dim() < 2 or min(along, default=0) < 0:
        return func(x.materialize(), pad, value)
    # With a scale of 0 any number represents 0.
    return map_parts(with_row_blocks(x), lambda t: func(t, [*within, *along], 0))


# ---- gathering ---------------------------------------------------------------------------------------------


def _all_gather(func: Any, x: Any, *group: Any) -> Any:
    """Gathers and waits immediately: ops on the result read several inner tensors and wait for none of them."""
    check_no_cotangents(Int8Tensor, func, [x])
    _register_wrap_rule()
    wait = torch.ops._c10d_functional.wait_tensor.default
    return map_parts(with_row_blocks(x), lambda t: wait(func(t.contiguous(), *group)))


@functools.cache
def _register_wrap_rule() -> None:
    """Registers a rule for the op with which some releases wrap results that are still pending.

    The results are complete here. A module that loads with the first collective registers the op, so this runs late.
    """
    op = getattr(torch.ops._c10d_functional, "_wrap_tensor_autograd", None)
    if op is not None:
        Int8Tensor.implements(op.default)(lambda _, x: map_parts(x, aten.alias.default))


# ---- in place ----------------------------------------------------------------------------------------------


def _per_inner(func: Any, filled: list[Any], *rest: Any) -> Any:
    """Broadcasts or scatters each inner tensor; returns one handle for all.

    Raises:
        DispatchError: the tensors are not all Int8Tensors with scales of one size, all or none with zero points.
    """
    first = filled[0]
    for t in _tensors_in((filled, rest)):
        if not isinstance(t, Int8Tensor) or t._layout.present != first._layout.present:
            raise DispatchError(
                f"{func}: expected {_describe(first)} throughout, got {_describe(t)} too",
                code="argument-refused",
                hint="quantize the inputs and outputs of all ranks alike, with symmetric=True or with symmetric=False",
            )
        if t.scale.shape != first.scale.shape:
            raise DispatchError(
                f"{func}: expected {_describe(first)} throughout, got {_describe(t)} too",
                code="argument-refused",
                hint="give each rank its own part, with src_data_rank=None in distribute_tensor or parallelize_module",
            )
    names = first._layout.present
    started = [func(_select_inner(filled, name), *_select_inner(rest, name)) for name in names]
    for t in filled:
        bump_versions([t, t.qdata, t.scale, t.zero_point])
    return filled, joint_work([work for *_, work in started])


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, list | tuple):
        return [t for v in value for t in _tensors_in(v)]
    return [value] if isinstance(value, Tensor) else []


def _select_inner(value: Any, name: str) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_select_inner(v, name) for v in value)
    return value.__dict__[name] if isinstance(value, Int8Tensor) else value


def _describe(t: Any) -> str:
    if not isinstance(t, Int8Tensor):
        return f"{one_of(type(t))} of size {tuple(t.shape)}"
    return f"Int8Tensors with a scale of {tuple(t.scale.shape)} and {'no' if t.zero_point is None else 'a'} zero point"


if dist.is_available():
    collectives = torch.ops._c10d_functional
    Int8Tensor.implements(collectives.all_gather_into_tensor.default)(_all_gather)
    Int8Tensor.implements(collectives.wait_tensor.default)(lambda op, x: map_parts(x, op))
    Int8Tensor.implements(torch.ops.c10d.broadcast_.default, torch.ops.c10d.scatter_.default)(_per_inner)
