"""Chooses the kernel of a dense attention as PyTorch would on the device.

PyTorch reads from the driver which kernels the device has. Without a driver it takes none of them, so an attention
would become matrix products and a softmax. The order and the conditions follow `sdp_utils.cpp`: flash attention for
half precision without a mask, else the memory-efficient kernel, and no kernel where neither fits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)
_WIDEST_FLASH, _ALIGNED = 256, 8


def attend(  # noqa: PLR0913
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Computes `scaled_dot_product_attention` by the kernel for the device; NotImplemented if none fits."""
    if not _takes(query, key, value):
        return NotImplemented
    if attn_mask is None and query.dtype in _HALF and torch.backends.cuda.flash_sdp_enabled():
        op = torch.ops.aten._scaled_dot_product_flash_attention.default
        return op(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if enable_gqa or not torch.backends.cuda.mem_efficient_sdp_enabled():
        return NotImplemented
    bias = None if attn_mask is None else _bias(attn_mask, query, key)
    if bias is not None and bias.shape[-1] % _ALIGNED:
        return NotImplemented
    needs_sums = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    op = torch.ops.aten._scaled_dot_product_efficient_attention.default
    return op(query, key, value, bias, needs_sums, dropout_p, is_causal, scale=scale)[0]


def _takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a kernel takes operands of these sizes and dtypes."""
    same = query.dtype == key.dtype == value.dtype and query.dtype in (*_HALF, torch.float32)
    width = query.shape[-1]
    return (
        same
        and query.dim() == 4
        and width == value.shape[-1] <= _WIDEST_FLASH
        and width % _ALIGNED == 0
        and 0 not in query.shape
    )


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Returns the mask as a bias of the scores, `[B, H, T, S]`."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
    return mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
