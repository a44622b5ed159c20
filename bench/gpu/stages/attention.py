"""Causal attention over rows back to back, by hand: what one writes without a tensor class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FLASH, CUDNN = "flash attention", "cuDNN attention"
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


def _flash(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
    op = torch.ops.aten._flash_attention_forward
    return op(q, k, v, offsets, offsets, longest, longest, 0.0, True, False)[0]


def _cudnn(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
    op = torch.ops.aten._cudnn_attention_forward
    return op(q, k, v, None, offsets, offsets, longest, longest, True, 0.0, True, False)[0]


def row_by_row(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
    """The stand-in on the CPU, where there is no kernel for rows of any lengths."""
    sizes: Any = offsets.diff().tolist()
    rows = zip(*(x.transpose(0, 1).split(sizes, 1) for x in (q, k, v)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*row, is_causal=True) for row in rows], 1).transpose(
        0, 1
    )


VARLEN: dict[str, Attend] = {FLASH: _flash, CUDNN: _cudnn}


def attend_flat(name: str, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
    """Attends within each row.

    Args:
        name: A kernel of `VARLEN`; the CPU has neither.
        q: The queries of all rows, `[total, heads, width]`.
        k: The keys.
        v: The values.
        offsets: Where each row starts, `[B + 1]`, int32.
        longest: The length of the longest row.
    """
    return (VARLEN[name] if q.is_cuda else row_by_row)(q, k, v, offsets, longest)
