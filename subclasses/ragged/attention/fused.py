"""Attention over ragged rows on CUDA, by PyTorch's kernels for rows of any lengths, without a padded table.

Both kernels take rows back to back, and their offsets. ``torch.nn.attention.sdpa_kernel`` disables each kernel as it
does for dense tensors.

* Flash attention (https://arxiv.org/abs/2205.14135) requires half precision. Under a causal mask its last query attends
  to the last key, so rows of queries and keys must have equal lengths.

* Memory-efficient attention (https://arxiv.org/abs/2112.05682) also accepts single precision. Its first query attends
  to the first key, as PyTorch defines a causal mask. Its backward allocates two tables as large as the padded queries.

``torch.nn.attention.varlen`` prefers cuDNN's kernel on some devices. This module does not call it: before cuDNN 9.25 a
row of length 0 has NaN as its result (https://github.com/NVIDIA/cudnn-frontend/issues/943). Batches of one size have
such rows.
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
_WIDEST_FLASH = 192  # features of a head; the backward of wider heads supports some devices only
_ALIGNED = 8  # both kernels require a multiple of this many features

# ---- which kernel ----------------------------------------------------------------------------------------------


class Kernel(Enum):
    """The kernels for rows of any lengths."""

    FLASH = "flash"
    EFFICIENT = "efficient"


def kernel_for(query: JaggedTensor, key: JaggedTensor, value: JaggedTensor, causal: bool) -> Kernel | None:
    """Returns the kernel for an attention without ``attn_mask``; None if no kernel supports it."""
    rows = (query, key, value)
    if query.stored.device.type != "cuda" or any(x.lengths is not None for x in rows):
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
    """Returns whether all devices support flash attention, and whether all support the other kernel; for NVIDIA's."""
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
    """Computes the attention of each row of ``query`` to the row of ``key`` with the same number.

    Args:
        kernel: the kernel to call.
        query: the tensor whose offsets locate the queries.
        key: the tensor whose offsets locate the keys and values.
        values: queries, keys and values, all ``[H, total, D]``.
        causal: query i of a row attends to the row's keys up to i.
        dropout_p: the share of probabilities that become 0.
        scale: factor of the scores.

    Returns:
        ``[H, total, D]``; 0 for a row without keys.
    """
    q, k, v = (_entry_major(x) for x in values)
    has_keys = None if same_rows(query, key) else query.segments.spread_rows(key.counts > 0).view(-1, 1, 1)
    if has_keys is not None:
        # The kernels define neither the result of a row without keys nor its gradient.
        q = torch.where(has_keys, q, 0)
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
    out = out if has_keys is None else torch.where(has_keys, out, 0)
    return out[..., : values[2].shape[-1]].transpose(0, 1)


def _entry_major(values: Tensor) -> Tensor:
    """Permutes ``[H, total, D]`` to ``[total, H, D]``, and pads the features to a multiple of 8 for the kernels."""
    entries = values.transpose(0, 1)
    missing = -entries.shape[-1] % _ALIGNED
    entries = F.pad(entries, [0, missing]) if missing else entries
    return entries if entries.stride(-1) == 1 else entries.contiguous()
