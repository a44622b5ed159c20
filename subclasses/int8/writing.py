"""Copies, conversions and writes: ops that store other numbers in the same blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subclasses.autograd.engine_ops import check_no_cotangents
from subclasses.errors import DispatchError
from subclasses.int8 import blocks
from subclasses.int8.parts import map_parts, with_parts
from subclasses.int8.tensor import Int8Tensor
from subclasses.op_schemas.aliasing import bump_versions

aten = torch.ops.aten

# ---- copies and conversions --------------------------------------------------------------------------------


@Int8Tensor.implements(aten.clone.default)
def _(func: Any, x: Any, **kwargs: Any) -> Any:
    return map_parts(x, lambda t: func(t, **kwargs), partial=False)


@Int8Tensor.implements(aten._to_copy.default)
def _(func: Any, x: Any, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """Changes the outer dtype to another floating point dtype; the numbers and their scales stay unchanged."""
    if dtype is not None and not dtype.is_floating_point:
        return func(x.materialize(), dtype=dtype, **kwargs)
    return map_parts(x, lambda t: func(t, **kwargs), float_dtype=dtype or x.dtype, partial=False)


@Int8Tensor.implements(aten.empty_like.default)
def _(func: Any, x: Any, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    if dtype is not None and not dtype.is_floating_point:
        return func(x.materialize(), dtype=dtype, **kwargs)
    return map_parts(x, lambda t: func(t, **kwargs), float_dtype=dtype or x.dtype, partial=False)


@Int8Tensor.implements(aten.new_zeros.default, aten.new_empty.default)
def _(func: Any, x: Any, size: Any, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """Returns a tensor of another size with blocks of the same size if they divide it; else a plain tensor.

    A tensor with another number of rows has a scale for each row: FSDP2 allocates a padded shard this way, then copies
    the shard to it.
    """
    counts = _counts_for(size, x) if dtype in (None, x.dtype) else None
    if counts is None:
        return func(x.materialize(), size, dtype=dtype, **kwargs)
    qdata = func(x.qdata, size, **kwargs)
    scale = func(x.scale, counts, **kwargs)
    zero_point = None if x.zero_point is None else func(x.zero_point, counts, **kwargs)
    return with_parts(x, qdata, scale, zero_point, partial=False)


def _counts_for(size: Any, x: Any) -> list[int] | None:
    if len(size) != x.dim():
        return None
    counts = []
    for dim, (new, s, n) in enumerate(zip(size, x.shape, x.scale.shape, strict=True)):
        extent = s // n if n else 1
        if dim == 0 and new != s and len(size) > 1:
            counts.append(new)
        elif n == 1:
            counts.append(1)
        elif new % extent:
            return None
        else:
            counts.append(new // extent)
    return counts


# ---- writes ------------------------------------------------------------------------------------------------


@Int8Tensor.implements(aten.copy_.default)
def _(func: Any, x: Any, source: Any, non_blocking: bool = False) -> Any:
    """Copies numbers and scales if the blocks of ``x`` can represent the source exactly.

    Raises:
        DispatchError: the blocks of ``x`` cannot represent the source exactly.
    """
    if not isinstance(x, Int8Tensor):
        check_no_cotangents(Int8Tensor, func, [source])
        return func(x, source.materialize(), non_blocking)
    if isinstance(source, Int8Tensor) and x.shape == source.shape and 0 in x.shape:
        return x
    scale, zero_point = _match_blocks(x, source)
    if not x.partial:
        x.scale.copy_(scale, non_blocking)
        if x.zero_point is not None:
            x.zero_point.copy_(zero_point, non_blocking)
    x.qdata.copy_(source.qdata, non_blocking)
    bump_versions([x.qdata, x.scale, x.zero_point])
    return x


def _match_blocks(x: Any, source: Any) -> tuple[Tensor, Any]:
    """Returns scale and zero point of the source for the blocks of ``x``.

    Raises:
        DispatchError: the source is not an ``Int8Tensor``, ``x`` would have to round, or ``x`` is partial and the scale
            of its block would change.
    """
    if not isinstance(source, Int8Tensor):
        raise DispatchError(
            "copy_ of floats to an Int8Tensor would round them",
            code="write-misfit",
            hint=f"quantize them first: x.copy_(Int8Tensor.from_float(source, block_size={x.block_size}))",
        )
    counts = x.scale.shape
    finer = source.shape == x.shape and all(
        a and b % a == 0 for a, b in zip(source.scale.shape, counts, strict=True)
    )
    if not finer or (x.zero_point is None and source.zero_point is not None):
        raise DispatchError(
            f"copy_: an Int8Tensor of size {tuple(x.shape)} with {_describe(x)} cannot hold one of size "
            f"{tuple(source.shape)} with {_describe(source)} exactly",
            code="write-misfit",
            hint="quantize the source for these blocks",
        )
    zero_point = source.zero_point
    if zero_point is None and x.zero_point is not None:
        zero_point = torch.zeros_like(source.scale, dtype=torch.int8)
    scale, zero_point = (
        None if t is None else blocks.refine_scale(t, counts) for t in (source.scale, zero_point)
    )
    if x.partial and not (_equal(x.scale, scale) and _equal(x.zero_point, zero_point)):
        raise DispatchError(
            "copy_ to a part of a block would change the scale of the whole block",
            code="blocks-refused",
            hint="write whole blocks of the tensor that it was sliced from, or quantize anew",
        )
    return scale, zero_point  # type: ignore[return-value]


def _equal(a: Any, b: Any) -> bool:
    return a is b or torch.equal(a, b.to(a.device, a.dtype))


def _describe(x: Any) -> str:
    return f"blocks of {x.block_size} and {'no' if x.zero_point is None else 'a'} zero point"
