"""Attention over ragged rows on CUDA, by PyTorch's kernels for rows of any lengths: no padded table is made.

Two kernels take rows back to back, with the offsets that a jagged tensor has anyway. Flash attention
(https://arxiv.org/abs/2205.14135) wants half precision and, under a causal mask, rows of queries that are as long as
those of keys, since it lets the last query see the last key. The memory-efficient one
(https://arxiv.org/abs/2112.05682) takes single precision too and lets the first query see the first key, as PyTorch
defines a causal mask; its backward works in two tables as large as padded queries there.
``torch.nn.attention.sdpa_kernel`` rules each out as it does for dense tensors.
"""

from __future__ import annotations

import functools
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses._torch import efficient_attention_rows, efficient_attention_traces, flash_attention_rows
from subclasses.ragged.checks import is_traced
from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.jagged.operands import same_rows

_HALF = (torch.float16, torch.bfloat16)
_WIDEST_FLASH = 192  # features of a head; beyond them its backward is for some devices only
_ALIGNED = 8  # both kernels want a multiple of this many features

# ---- which kernel ----------------------------------------------------------------------------------------------


class Kernel(Enum):
    """The kernels for rows of any lengths."""

    FLASH = "flash"
    EFFICIENT = "efficient"


def kernel_for(query: JaggedTensor, key: JaggedTensor, value: JaggedTensor, causal: bool) -> Kernel | None:
    """The kernel that computes an attention without a mask of its own; None if none does."""
    rows = (query, key, value)
    if query.device.type != "cuda" or any(x.lengths is not None for x in rows):
        return None
    dtypes = {x.dtype for x in rows}
    if len(dtypes) != 1 or not dtypes <= {*_HALF, torch.float32}:
        return None
    if query.shape[0] == 0 or query.max_length == 0 or key.max_length == 0:
        return None
    ampere, any_device = _devices()
    width = query.shape[-1]
    flash = ampere and torch.backends.cuda.flash_sdp_enabled() and dtypes <= set(_HALF)
    if flash and width == value.shape[-1] <= _WIDEST_FLASH and (not causal or same_rows(query, key)):
        return Kernel.FLASH
    efficient = any_device and torch.backends.cuda.mem_efficient_sdp_enabled()
    if is_traced(query.offsets) and torch.is_grad_enabled():
        efficient = efficient and efficient_attention_traces
    return Kernel.EFFICIENT if efficient else None


@functools.cache
def _devices() -> tuple[bool, bool]:
    """Whether every device has flash attention, and whether it has the other kernel: both are for NVIDIA's."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return False, False
    least = min(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
    return least >= (8, 0) and torch.backends.cuda.is_flash_attention_available(), least >= (5, 0)


# ---- the call --------------------------------------------------------------------------------------------------


def attend_fused(  # noqa: PLR0913
    kernel: Kernel,
    query: JaggedTensor,
    key: JaggedTensor,
    values: tuple[Tensor, Tensor, Tensor],
    causal: bool,
    dropout_p: float,
    scale: float,
) -> Tensor:
    """Attention of the entries of each row of ``query`` to those of the row of the same number of ``key``.

    Args:
        kernel: which one.
        query: its rows say where each query is.
        key: its rows say where each key and value is.
        values: queries, keys and values, all ``[H, total, D]``.
        causal: query i of a row sees the row's keys up to i.
        dropout_p: the share of probabilities that become 0.
        scale: factor of the scores.

    Returns:
        ``[H, total, D]``; 0 for a row without keys.
    """
    q, k, v = (_entry_major(x) for x in values)
    found = (
        None if same_rows(query, key) else query.segments.spread_rows(key.row_lengths() > 0).view(-1, 1, 1)
    )
    if found is not None:
        # What the kernels make of a row without keys, and of its gradient, is their own affair.
        q = torch.where(found, q, 0)
    starts = [x.offsets.to(torch.int32) for x in (query, key)]
    longest = query.max_length, key.max_length
    if kernel is Kernel.FLASH:
        out = flash_attention_rows(q, k, v, *starts, *longest, dropout_p, causal, False, scale=scale)[0]
    else:
        batch = (x.unsqueeze(0) for x in (q, k, v))
        out = efficient_attention_rows(
            *batch, None, *starts, *longest, dropout_p, int(causal), True, scale=scale
        )
        out = out[0].squeeze(0)
    out = out if found is None else torch.where(found, out, 0)
    return out[..., : values[2].shape[-1]].transpose(0, 1)


def _entry_major(values: Tensor) -> Tensor:
    """``[H, total, D]`` to ``[total, H, D]`` with as many features as a kernel takes."""
    entries = values.transpose(0, 1)
    missing = -entries.shape[-1] % _ALIGNED
    entries = F.pad(entries, [0, missing]) if missing else entries
    return entries if entries.stride(-1) == 1 else entries.contiguous()
