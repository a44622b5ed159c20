"""``F.multi_head_attention_forward`` of rows: projections, attention of each row to its own, and a projection back."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.attention.rule import score_mask
from subclasses.ragged.base import is_ragged, name_of, shown
from subclasses.ragged.modules.time_major import TimeMajor
from subclasses.ragged.registry import Rules
from subclasses.slow_paths import say_once

RULES = Rules()


@RULES.of(F.multi_head_attention_forward)
def _multi_head(  # noqa: PLR0913
    func: Any,
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    _check_plain_heads(func, bias_k, bias_v, add_zero_attn, static_k, static_v)
    if is_causal and attn_mask is None:
        raise ValueError(f"{name_of(func)}: is_causal says what attn_mask is; pass attn_mask as well")
    rows: dict[int, Any] = {}
    q, k, v = (rows.setdefault(id(x), _batch_first(func, x)) for x in (query, key, value))
    if q.shape[-1] != embed_dim_to_check:
        raise ValueError(
            f"{name_of(func)}: expected entries of {embed_dim_to_check} features, got {shown(q)}"
        )
    separate = q_proj_weight, k_proj_weight, v_proj_weight
    weights = separate if use_separate_proj_weight else in_proj_weight.chunk(3)
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    q, k, v = (
        F.linear(x, w, b).unflatten(-1, (num_heads, -1)).transpose(1, 2)
        for x, w, b in zip((q, k, v), weights, biases, strict=True)
    )
    mask = _merged_mask(attn_mask, key_padding_mask, q, num_heads)
    causal = is_causal and key_padding_mask is None and not need_weights
    if need_weights:
        say_once(
            "nn.MultiheadAttention of rows with need_weights=True computes every weight of a padded table",
            "pass need_weights=False where the weights are not used",
        )
    scores = F.dropout(_weights(q, k, mask), dropout_p, training) if need_weights else None
    if scores is None:
        dropout_p = dropout_p if training else 0.0
        heads = F.scaled_dot_product_attention(q, k, v, None if causal else mask, dropout_p, causal)
    else:
        heads = _summed(q, scores, v)
    out = F.linear(heads.transpose(1, 2).flatten(-2), out_proj_weight, out_proj_bias)
    return out.transpose(0, 1), scores if scores is None or not average_attn_weights else scores.mean(1)


def _batch_first(func: Any, x: Any) -> Any:
    """Rows ``[B, T, E]`` of an argument ``[T, B, E]``."""
    if isinstance(x, TimeMajor) or (is_ragged(x) and x.dim() == 3 and x.row_dims == (1, 0)):
        return x.transpose(0, 1)
    raise DispatchError(
        f"{name_of(func)}: expected query, key and value of rows [T, B, E], as nn.MultiheadAttention(batch_first=True) "
        f"makes them of rows [B, T, E]; got {shown(x)}",
        code="argument-refused",
    )


def _check_plain_heads(
    func: Any, bias_k: Any, bias_v: Any, add_zero_attn: bool, static_k: Any, static_v: Any
) -> None:
    """Raises for options that would add entries to the rows of keys."""
    if add_zero_attn or any(t is not None for t in (bias_k, bias_v, static_k, static_v)):
        raise DispatchError(
            f"{name_of(func)}: add_bias_kv, add_zero_attn, static_k and static_v add keys to each row, which is not "
            "supported for ragged rows",
            code="argument-refused",
            hint="append them by torch.cat before the module",
        )


def _merged_mask(attn_mask: Any, key_padding_mask: Any, q: Any, num_heads: int) -> Any:
    """One mask that is added to the scores ``[B, H, T, S]``; True in a mask of bools stands for minus infinity."""
    parts = []
    if attn_mask is not None:
        mask = _added(attn_mask, q.dtype)
        parts.append(mask.unflatten(0, (-1, num_heads)) if mask.dim() == 3 else mask)
    if key_padding_mask is not None:
        parts.append(_added(key_padding_mask, q.dtype)[:, None, None, :])
    return sum(parts[1:], parts[0]) if parts else None


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to scores."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)


def _weights(q: Any, k: Any, mask: Any) -> Tensor:
    """The weights ``[B, H, T, S]`` of each key for each query; 0 where either does not exist."""
    scores = torch.matmul(q.to_dense() / math.sqrt(q.shape[-1]), k.to_dense().mT)
    allowed = score_mask(q, k, mask, False)
    scores = scores.masked_fill(~allowed, -math.inf) if allowed.dtype is torch.bool else scores + allowed
    exists = q.mask()[:, None, :, None] & k.mask()[:, None, None, :]
    return torch.where(exists, scores.softmax(-1), 0)


def _summed(q: Any, scores: Tensor, v: Any) -> Any:
    """The sums of values by weight, as the rows of the queries."""
    return q.from_table(torch.matmul(scores, v.to_dense()))
