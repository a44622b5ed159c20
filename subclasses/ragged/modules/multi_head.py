"""``F.multi_head_attention_forward`` of rows: projections, attention of each row to its keys, and a projection back."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.attention.rule import all_as_rows, score_mask
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
    _check_added_keys(func, bias_k is not None or add_zero_attn, need_weights, static_k, static_v)
    if is_causal and attn_mask is None:
        raise ValueError(f"{name_of(func)}: is_causal only describes attn_mask; pass attn_mask as well")
    rows: dict[int, Any] = {}
    q, k, v = (rows.setdefault(id(x), _batch_first(func, x)) for x in (query, key, value))
    q, k, v = all_as_rows(q, k, v)
    if q.shape[-1] != embed_dim_to_check:
        raise ValueError(
            f"{name_of(func)}: expected entries of {embed_dim_to_check} features, got {shown(q)}"
        )
    separate = q_proj_weight, k_proj_weight, v_proj_weight
    weights = separate if use_separate_proj_weight else in_proj_weight.chunk(3)
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip((q, k, v), weights, biases, strict=True))
    added = [] if bias_k is None else [(bias_k, bias_v)]
    if add_zero_attn:
        zero = out_proj_weight.new_zeros(1, 1, 1)
        added.append((zero, zero))
    causal = is_causal and key_padding_mask is None and not need_weights
    for more_key, more_value in added:
        k, v = _with_entry(k, more_key, last=causal), _with_entry(v, more_value, last=causal)
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    mask = _merged_mask(attn_mask, key_padding_mask, q, num_heads)
    if mask is not None and added:
        mask = F.pad(mask, [len(added), 0])
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
    out = out if is_ragged(query) or isinstance(query, TimeMajor) else out.to_dense()
    return out.transpose(0, 1), scores if scores is None or not average_attn_weights else scores.mean(1)


def _batch_first(func: Any, x: Any) -> Any:
    """Returns rows ``[B, T, E]`` of an argument ``[T, B, E]``, which may be dense."""
    if is_ragged(x):
        fits = x.dim() == 3 and x.row_dims == (1, 0)
    else:
        fits = isinstance(x, TimeMajor) or (x.dim() == 3 and not hasattr(type(x), "__spec__"))
    if fits:
        return x.transpose(0, 1)
    raise DispatchError(
        f"{name_of(func)}: expected query, key and value of rows [T, B, E], as nn.MultiheadAttention(batch_first=True) "
        f"makes them of rows [B, T, E]; got {shown(x)}",
        code="argument-refused",
    )


def _check_added_keys(func: Any, adds: bool, need_weights: bool, static_k: Any, static_v: Any) -> None:
    """Raises for static keys and values, and for weights of added keys, which a table of weights cannot represent."""
    if static_k is not None or static_v is not None:
        raise DispatchError(
            f"{name_of(func)}: expected neither static_k nor static_v beside ragged rows",
            code="argument-refused",
            hint="call F.scaled_dot_product_attention with rows of keys and values",
        )
    if adds and need_weights:
        raise DispatchError(
            f"{name_of(func)}: the keys of add_bias_kv or add_zero_attn come behind the keys of each row, so "
            "their weights lie at another index in each row",
            code="argument-refused",
            hint="pass need_weights=False",
        )


def _with_entry(rows: Any, entry: Tensor, *, last: bool) -> Any:
    """Adds an entry ``[1, 1, E]`` to each row: last, where PyTorch's causal mask expects it, or else first.

    If the entry is first, the mask has one more column in front, the same for all rows.
    """
    parts = [entry.expand(rows.shape[0], 1, rows.shape[-1]), rows]
    return torch.cat(parts[::-1] if last else parts, 1)


def _merged_mask(attn_mask: Any, key_padding_mask: Any, q: Any, num_heads: int) -> Any:
    """Returns one mask to add to the scores ``[B, H, T, S]``; True in a bool mask becomes minus infinity."""
    parts = []
    if attn_mask is not None:
        mask = _added(attn_mask, q.dtype)
        parts.append(mask.unflatten(0, (-1, num_heads)) if mask.dim() == 3 else mask)
    if key_padding_mask is not None:
        parts.append(_added(key_padding_mask, q.dtype)[:, None, None, :])
    return sum(parts[1:], parts[0]) if parts else None


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a mask that is added to scores."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)


def _weights(q: Any, k: Any, mask: Any) -> Tensor:
    """Returns the weights ``[B, H, T, S]`` of each key for each query; 0 where either does not exist."""
    scores = torch.matmul(q.to_dense() / math.sqrt(q.shape[-1]), k.to_dense().mT)
    allowed = score_mask(q, k, mask, False)
    scores = scores.masked_fill(~allowed, -math.inf) if allowed.dtype is torch.bool else scores + allowed
    exists = q.mask()[:, None, :, None] & k.mask()[:, None, None, :]
    return torch.where(exists, scores.softmax(-1), 0)


def _summed(q: Any, scores: Tensor, v: Any) -> Any:
    """Returns the weighted sums of values, with the rows of the queries."""
    return q.from_table(torch.matmul(scores, v.to_dense()))
