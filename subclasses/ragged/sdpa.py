"""``scaled_dot_product_attention`` of ragged tensors: each row attends to the row of the same number."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.attention import ragged_attention
from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.rows import shown

# ---- the rule --------------------------------------------------------------------------------------------------


@JaggedTensor.implements(F.scaled_dot_product_attention)
def _(  # noqa: PLR0913
    func: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    for x in (query, key, value):
        _check_operand(x)
    if attn_mask is not None or dropout_p:
        raise DispatchError(
            "scaled_dot_product_attention: ragged tensors attend without attn_mask and dropout_p so far; use "
            "x.to_dense() with x.mask()"
        )
    q, k, v = _heads_first(query), _heads_first(key), _heads_first(value)
    if enable_gqa and k.shape[0] != q.shape[0]:
        k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    rows = query.offsets, key.offsets, query.lengths, key.lengths
    out, _ = ragged_attention(q, k, v, *rows, is_causal, scale)
    return query.with_values(out.view(*query.values.shape[:-1], out.shape[-1]))


def _heads_first(x: JaggedTensor) -> Tensor:
    """``[..., total, D]`` to ``[H, total, D]``."""
    values = x.clean_values()
    return values if values.dim() == 3 else values.reshape(-1, *values.shape[-2:])


def _check_operand(x: Any) -> None:
    if not isinstance(x, JaggedTensor) or x.ragged_dim != x.dim() - 2 or x.ragged_dim == 0:
        raise DispatchError(
            f"scaled_dot_product_attention: expected ragged query, key and value [B, ..., T, D], got {shown(x)}; "
            f"transpose so that the ragged dimension is the last but one"
        )
