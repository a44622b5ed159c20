"""Ops that move entries and preserve their blocks: transposes, slices, views, splits, joins.

Results share storage with their argument, scales included, wherever the results of a plain tensor would. A slice that
would leave uneven blocks raises. A slice within a single block keeps that block's scale and is marked ``partial``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import canonicalize_dim
from subclasses.autograd.engine_ops import check_no_cotangents, is_cotangent
from subclasses.errors import DispatchError
from subclasses.int8 import blocks
from subclasses.int8.parts import map_parts, with_parts
from subclasses.int8.tensor import Int8Tensor

aten = torch.ops.aten

# ---- dimensions --------------------------------------------------------------------------------------------


@Int8Tensor.implements(
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
def _(func: Any, x: Any, *args: Any) -> Any:
    if not isinstance(x, Int8Tensor):
        return NotImplemented
    if func in _SQUEEZES:  # a dimension with one block may have several entries
        func, args = aten.squeeze.dims, (_squeezable_dims(x, *args),)
    return map_parts(x, lambda t: func(t, *args))


_SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)


def _squeezable_dims(x: Tensor, dims: Any = None) -> list[int]:
    given = range(x.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    return [canonicalize_dim(x.dim(), d) for d in given if x.shape[canonicalize_dim(x.dim(), d)] == 1]


@Int8Tensor.implements(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)
def _(func: Any, x: Any, size: Any, *_: Any) -> Any:
    qdata = aten.view.default(x.qdata, size)
    scales: list[Any] = [x.scale, x.zero_point]
    if 0 in x.shape and qdata.shape != x.shape:  # without entries the scales do not matter
        counts = tuple(min(s, 1) for s in qdata.shape)
        scales = [None if t is None else aten.slice.Tensor(t, 0, 0, 0) for t in scales]
    else:
        counts = blocks.view_counts(x.shape, x.scale.shape, qdata.shape)
    return with_parts(x, qdata, *(None if t is None else aten.view.default(t, counts) for t in scales))  # type: ignore[arg-type]


@Int8Tensor.implements(aten.as_strided.default)
def _(func: Any, x: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """Returns the view with given sizes and strides: transposed, sliced, or the same entries under other sizes.

    FSDP2 makes parameters this way, and ``torch.compile`` recreates arguments that are views of each other.
    """
    size, stride, begin = tuple(size), tuple(stride), x.storage_offset()
    offset = begin if storage_offset is None else storage_offset
    # On newer releases, torch.compile adds the storage offset of its argument twice when it recreates a view.
    relative_offsets = (
        {offset - begin, offset - 2 * begin}
        if COUNTS_TWICE and storage_offset is not None
        else {offset - begin}
    )
    views = [view for n in relative_offsets if (view := _view_at(x, size, stride, n)) is not None]
    if len(views) != 1:
        why = "may be either of two views" if views else "is not a view"
        raise DispatchError(
            f"as_strided: size {size} with strides {stride} and storage offset {offset} {why} of an Int8Tensor of size "
            f"{tuple(x.shape)} with strides {x.stride()} that keeps its blocks",
            code="blocks-refused",
            hint="call dequantize() first, or clone() the view",
        )
    return views[0]


COUNTS_TWICE = not torch.__version__.startswith(("2.11.", "2.12.", "2.13."))


def _view_at(x: Any, size: tuple[int, ...], stride: tuple[int, ...], relative_offset: int) -> Any:
    """Returns the view that begins the given number of entries after ``x``, or None."""
    if relative_offset < 0:
        return None
    if (size, stride, relative_offset) == (tuple(x.shape), x.stride(), 0):
        return map_parts(x, aten.alias.default)
    try:
        view = _match_strides(x, size, stride, relative_offset)
        if view is None and relative_offset == 0 and math.prod(size) == x.numel() and x.is_contiguous():
            view = aten.view.default(x, size)
    except DispatchError:  # the view cuts through a block
        return None
    if view is None or _strides(view) != _strides_of(size, stride):
        return None
    return view if view.storage_offset() == x.storage_offset() + relative_offset else None


def _strides(x: Any) -> list[Any]:
    return _strides_of(x.shape, x.stride())


def _strides_of(size: Any, stride: Any) -> list[Any]:
    """Pairs sizes with strides; the stride of a dimension with one entry is ignored."""
    return [(s, t if s > 1 else 0) for s, t in zip(size, stride, strict=True)]


def _match_strides(x: Any, size: Any, stride: Any, offset: int) -> Any:
    """Returns the view whose dimensions match dimensions of ``x`` by their strides, or None."""
    free = sorted((d for d in range(x.dim()) if x.shape[d] > 1), key=lambda d: -x.stride(d))
    wanted = {j: t for j, (s, t) in enumerate(zip(size, stride, strict=True)) if s > 1}
    matches = {j: next((d for d in free if x.stride(d) == t), None) for j, t in wanted.items()}
    if None in matches.values() or len(set(matches.values())) < len(matches) or 0 in size:
        return None
    extents = {d: size[j] for j, d in matches.items()}
    for d in free:
        start, offset = divmod(offset, x.stride(d))
        if start + extents.get(d, 1) > x.shape[d]:
            return None
        x = _sliced(x, d, start, start + extents.get(d, 1))
    matched_dims = [d for _, d in sorted(matches.items())]
    x = aten.permute.default(x, [*matched_dims, *(d for d in range(x.dim()) if d not in matched_dims)])
    for j, s in enumerate(size):
        if s == 1:
            x = aten.unsqueeze.default(x, j)
    rest = tuple(range(len(size), x.dim()))
    return aten.squeeze.dims(x, rest) if rest else x


# ---- slicing and splitting ---------------------------------------------------------------------------------


@Int8Tensor.implements(aten.slice.Tensor)
def _(func: Any, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    dim = canonicalize_dim(x.dim(), dim)
    start, end, _ = slice(start, end).indices(x.shape[dim])
    return _sliced(x, dim, start, max(start, end), step)


def _sliced(x: Any, dim: int, start: int, end: int, step: int = 1) -> Any:
    """Returns the entries from ``start`` to ``end`` along a dimension, with the scales of their blocks."""
    first, last, partial = _blocks_within(x, dim, start, end, step)
    qdata = aten.slice.Tensor(x.qdata, dim, start, end, step)
    every = step if x.scale.shape[dim] == x.shape[dim] else 1
    scale, zero_point = (
        None if t is None else aten.slice.Tensor(t, dim, first, last, every) for t in (x.scale, x.zero_point)
    )
    return with_parts(x, qdata, scale, zero_point, partial=x.partial or partial)  # type: ignore[arg-type]


def _blocks_within(x: Any, dim: int, start: int, end: int, step: int) -> tuple[int, int, bool]:
    """Returns the first block, the end of the blocks, and whether the slice covers only a part of one block.

    Raises:
        DispatchError: the slice would leave uneven blocks.
    """
    size, n = x.shape[dim], x.scale.shape[dim]
    if n == size:
        return start, end, False
    if size == 0:
        return 0, n, False
    extent = size // n
    if start % extent == 0 and end % extent == 0 and step == 1 and (n > 1 or start < end):
        return start // extent, end // extent, False
    first = min(start // extent, n - 1)
    if end <= (first + 1) * extent:
        return first, first + 1, True
    raise DispatchError(
        f"slice [{start}:{end}:{step}] of dimension {dim} cuts through blocks of {x.block_size}",
        code="blocks-refused",
        hint=f"slice at multiples of {extent}, within one block, or call dequantize() first",
    )


@Int8Tensor.implements(aten.select.int)
def _(func: Any, x: Any, dim: int, index: int) -> Any:
    dim = canonicalize_dim(x.dim(), dim)
    return _selected(x, dim, _index(x, dim, index))


def _index(x: Any, dim: int, index: int) -> int:
    if not -x.shape[dim] <= index < x.shape[dim]:
        raise IndexError(
            f"select(): index {index} out of range for tensor of size {list(x.shape)} at dimension {dim}"
        )
    return index % x.shape[dim]


def _selected(x: Any, dim: int, index: int) -> Any:
    if x.dim() == 1:
        raise DispatchError(
            "select: an Int8Tensor has one dimension or more",
            code="blocks-refused",
            hint="call dequantize() first",
        )
    one = _sliced(x, dim, index, index + 1)
    return map_parts(one, lambda t: aten.select.int(t, dim, 0))


@Int8Tensor.implements(aten.unbind.int)
def _(func: Any, x: Any, dim: int = 0) -> Any:
    dim = canonicalize_dim(x.dim(), dim)
    return [_selected(x, dim, i) for i in range(x.shape[dim])]


@Int8Tensor.implements(aten.split.Tensor)
def _(func: Any, x: Any, split_size: int, dim: int = 0) -> Any:
    dim = canonicalize_dim(x.dim(), dim)
    size = x.shape[dim]
    if split_size < 1 and (split_size < 0 or size):
        raise RuntimeError(f"split: expected a size of 1 or more, got {split_size}")
    starts = range(0, size, split_size) if size else [0]
    return [_sliced(x, dim, i, min(i + split_size, size)) for i in starts]


@Int8Tensor.implements(aten.split_with_sizes.default)
def _(func: Any, x: Any, sizes: Sequence[int], dim: int = 0) -> Any:
    dim, parts, start = canonicalize_dim(x.dim(), dim), [], 0
    if any(s < 0 for s in sizes):
        raise RuntimeError(f"split_with_sizes: expected sizes of 0 or more, got {list(sizes)}")
    if sum(sizes) != x.shape[dim]:
        raise RuntimeError(
            f"split_with_sizes: {list(sizes)} do not add up to {x.shape[dim]}, the extent of dim {dim}"
        )
    for s in sizes:
        parts.append(_sliced(x, dim, start, start + s))
        start += s
    return parts


# ---- joining -----------------------------------------------------------------------------------------------


@Int8Tensor.implements(aten.cat.default)
def _(func: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    """Concatenates tensors of one kind, with the coarsest blocks that divide the blocks of all."""
    quantized = [t for t in tensors if isinstance(t, Int8Tensor)]
    if not _can_join(tensors, dim):
        return func([t.materialize() if isinstance(t, Int8Tensor) else t for t in tensors], dim)
    dim = canonicalize_dim(tensors[0].dim(), dim)
    counts = _joint_counts(tensors, dim)
    if any(tuple(t.scale.shape) != tuple(c) for t, c in zip(tensors, counts, strict=True)):
        check_no_cotangents(
            Int8Tensor, func, quantized
        )  # the gradient of a scale is not the gradient of each part
    scales = func([blocks.refine_scale(t.scale, c) for t, c in zip(tensors, counts, strict=True)], dim)
    zero_point = None
    if any(t.zero_point is not None for t in tensors):
        zeros = (
            torch.zeros_like(t.scale, dtype=torch.int8) if t.zero_point is None else t.zero_point
            for t in tensors
        )
        zero_point = func([blocks.refine_scale(z, c) for z, c in zip(zeros, counts, strict=True)], dim)
    return with_parts(tensors[0], func([t.qdata for t in tensors], dim), scales, zero_point, partial=False)


@Int8Tensor.implements(aten.stack.default)
def _(func: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    return aten.cat.default([t.unsqueeze(dim) for t in tensors], dim).contiguous()  # as for plain tensors


def _can_join(tensors: Sequence[Any], dim: int) -> bool:
    """Whether tensors can be joined without materializing: one class, dtype and activation, and sizes that fit."""
    first = tensors[0]
    if not all(isinstance(t, Int8Tensor) and t.dim() == first.dim() for t in tensors):
        return False
    d = canonicalize_dim(first.dim(), dim)
    return all(
        (t.dtype, t.scale.dtype, t.activation, t.activation_symmetric, is_cotangent(t))
        == (first.dtype, first.scale.dtype, first.activation, first.activation_symmetric, is_cotangent(first))
        and 0 not in t.shape
        and all(a == b for i, (a, b) in enumerate(zip(t.shape, first.shape, strict=True)) if i != d)
        for t in tensors
    )


def _joint_counts(tensors: Sequence[Any], dim: int) -> list[list[int]]:
    """Returns the block counts to refine each tensor to, so that all blocks have the same size."""
    common = blocks.common_counts([t.scale.shape for t in tensors])
    extent = math.gcd(*(t.block_size[dim] for t in tensors))
    return [[t.shape[dim] // extent if i == dim else n for i, n in enumerate(common)] for t in tensors]
