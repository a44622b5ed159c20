"""Affine quantization: ``q = round(x / scale) + zero_point``, ``x ≈ (q - zero_point) * scale``.

Scales are computed as torchao computes them, so a model quantized here is as accurate as a model of torchao. A
symmetric scale divides the largest magnitude by 127.5, an asymmetric scale divides the range of values, 0 included, by
255. For dtypes narrower than float32 scales are stored in float32, because a scale rounded to the narrower dtype would
add an error to each entry.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from subclasses.int8.blocks import Size, expand_scale, split_blocks

LOWEST, HIGHEST = -128, 127


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which scales are computed and stored."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def choose_scale(x: Tensor, counts: Size, symmetric: bool) -> tuple[Tensor, Tensor | None]:
    """Returns the scale and the zero point (None if symmetric) of each block, both of size ``counts``."""
    dtype = scale_dtype(x.dtype)
    if x.dtype is not torch.bfloat16:  # products with a scale that bfloat16 can represent round less
        x = x.to(dtype)
    if 0 in x.shape:
        scale = x.new_ones(tuple(counts), dtype=dtype)
        return scale, None if symmetric else torch.zeros_like(scale, dtype=torch.int8)
    blocked, within = split_blocks(x, counts)
    least = torch.finfo(dtype).tiny
    if symmetric:
        return (blocked.abs().amax(within) / 127.5).to(dtype).clamp(min=least), None
    low, high = blocked.amin(within).clamp(max=0), blocked.amax(within).clamp(min=0)
    scale = ((high / 2 - low / 2) / 127.5).to(dtype).clamp(min=least)
    zero_point = (LOWEST - (low.to(dtype) / scale).round()).clamp(LOWEST, HIGHEST)
    return scale, zero_point.to(torch.int8)


def to_int8(x: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """Quantizes floats to the nearest int8 numbers, given the scale and zero point of each block."""
    q = (x.to(scale.dtype) / expand_scale(scale, x.shape)).round()
    if zero_point is not None:
        q = q + expand_scale(zero_point, x.shape)
    return q.clamp(LOWEST, HIGHEST).to(torch.int8)


def from_int8(q: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Dequantizes int8 numbers to ``dtype``; differentiable in ``scale``."""
    x = q.to(scale.dtype)
    if zero_point is not None:
        x = shift(x, zero_point)
    return _by_block(torch.mul, x, scale).to(dtype)


def shift(x: Tensor, zero_point: Tensor) -> Tensor:
    """Subtracts the zero point of each block."""
    return _by_block(torch.sub, x, zero_point.to(x.dtype))


def sum_blocks(x: Tensor, counts: Size) -> Tensor:
    """Returns the sum of each block."""
    blocked, within = split_blocks(x, counts)
    return blocked.sum(within)


def _by_block(op: Callable[[Tensor, Tensor], Tensor], x: Tensor, of_blocks: Tensor) -> Tensor:
    """Applies ``op`` to each entry and its block's number, without repeating the numbers in memory."""
    if all(n in (1, s) for s, n in zip(x.shape, of_blocks.shape, strict=True)):
        return op(x, of_blocks)
    blocked, _ = split_blocks(x, of_blocks.shape)
    return op(blocked, of_blocks.reshape([e for n in of_blocks.shape for e in (n, 1)])).reshape(x.shape)
