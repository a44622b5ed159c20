"""Numbers to int8 and back: ``q = round(x / scale) + zero_point``, ``x ≈ (q - zero_point) * scale``.

Scales follow torchao's affine quantization, so that a model quantized here is as good as one quantized there:
symmetric ones spread the largest magnitude over 127.5 steps, asymmetric ones the range from the least to the
greatest value, 0 included, over 255. They are kept in float32 for the narrower dtypes, whose own few bits would
add an error to each entry.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subclasses.int8.blocks import Size, split_blocks, spread

LOWEST, HIGHEST = -128, 127


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that scales are computed and kept in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def choose_scale(x: Tensor, counts: Size, symmetric: bool) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point (None if symmetric) for each block; both of the size ``counts``."""
    dtype = wide(x.dtype)
    if x.dtype is not torch.bfloat16:  # where a scale is one of its numbers, products with it round less
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
    """The nearest int8 numbers, for scales that one block or more have."""
    q = (x.to(scale.dtype) / spread(scale, x.shape)).round()
    if zero_point is not None:
        q = q + spread(zero_point, x.shape)
    return q.clamp(LOWEST, HIGHEST).to(torch.int8)


def from_int8(q: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What int8 numbers stand for; differentiable in ``scale``."""
    x = q.to(scale.dtype)
    if zero_point is not None:
        x = x - spread(zero_point, q.shape).to(scale.dtype)
    return (x * spread(scale, q.shape)).to(dtype)
