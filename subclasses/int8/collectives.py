"""Parts of a distributed parameter put together: int8 numbers are sent, and a scale for each row.

``DTensor.full_tensor`` does this, and so do the full state dicts of `torch.distributed.checkpoint`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from subclasses.dispatch.aliasing import bump_versions
from subclasses.dispatch.cotangents import check_no_cotangents
from subclasses.errors import DispatchError
from subclasses.int8.parts import map_parts, rows_apart
from subclasses.int8.tensor import Int8Tensor

aten = torch.ops.aten

# ---- padded ------------------------------------------------------------------------------------------------


@Int8Tensor.implements(aten.constant_pad_nd.default)
def _(func: Any, x: Any, pad: Sequence[int], value: Any = 0) -> Any:
    """Rows of zeros around, as ``DTensor`` adds them to parts of uneven size; else a plain tensor."""
    check_no_cotangents(Int8Tensor, func, [x])
    within, along = list(pad[: 2 * (x.dim() - 1)]), list(pad[2 * (x.dim() - 1) :])
    if value != 0 or any(within) or x.dim() < 2 or min(along, default=0) < 0:
        return func(x.materialize(), pad, value)
    # A scale of 0 has any number stand for 0.
    return map_parts(rows_apart(x), lambda t: func(t, [*within, *along], 0))


# ---- gathered ----------------------------------------------------------------------------------------------


def _gathered(func: Any, x: Any, *group: Any) -> Any:
    """Waits at once: what is asked of the result reads several tensors, and waits for none."""
    check_no_cotangents(Int8Tensor, func, [x])
    _learn_to_wrap()
    wait = torch.ops._c10d_functional.wait_tensor.default
    return map_parts(rows_apart(x), lambda t: wait(func(t.contiguous(), *group)))


@functools.cache
def _learn_to_wrap() -> None:
    """Some releases make an op of the wrapper around results that have not arrived; these have.

    The op is registered by a module that is loaded with the first collective.
    """
    op = getattr(torch.ops._c10d_functional, "_wrap_tensor_autograd", None)
    if op is not None:
        Int8Tensor.implements(op.default)(lambda _, x: map_parts(x, aten.alias.default))


# ---- in place ----------------------------------------------------------------------------------------------


def _part_by_part(func: Any, filled: list[Any], *rest: Any) -> Any:
    """A broadcast or scatter of numbers, scales and zero points; the last one is not waited for."""
    first, work = filled[0], None
    for t in _tensors_in((filled, rest)):
        if not isinstance(t, Int8Tensor) or t._layout.present != first._layout.present:
            raise DispatchError(f"{func}: expected {_shown(first)} throughout, got {_shown(t)} too")
        if t.scale.shape != first.scale.shape:
            raise DispatchError(
                f"{func}: expected {_shown(first)} throughout, got {_shown(t)} too; give each rank its own part, with "
                f"src_data_rank=None in distribute_tensor or parallelize_module"
            )
    for name in first._layout.present:
        if work is not None:
            dist.Work.unbox(work).wait()
        *_, work = func(_parts_in(filled, name), *_parts_in(rest, name))
    for t in filled:
        bump_versions([t, t.qdata, t.scale, t.zero_point])
    return filled, work


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, list | tuple):
        return [t for v in value for t in _tensors_in(v)]
    return [value] if isinstance(value, Tensor) else []


def _parts_in(value: Any, name: str) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_parts_in(v, name) for v in value)
    return value.__dict__[name] if isinstance(value, Int8Tensor) else value


def _shown(t: Any) -> str:
    if not isinstance(t, Int8Tensor):
        return f"a {type(t).__name__}"
    return f"Int8Tensors with a scale of {tuple(t.scale.shape)} and {'no' if t.zero_point is None else 'a'} zero point"


if dist.is_available():
    collectives = torch.ops._c10d_functional
    Int8Tensor.implements(collectives.all_gather_into_tensor.default)(_gathered)
    Int8Tensor.implements(collectives.wait_tensor.default)(lambda op, x: map_parts(x, op))
    Int8Tensor.implements(torch.ops.c10d.broadcast_.default, torch.ops.c10d.scatter_.default)(_part_by_part)
