"""Layers, matrix products and attention of a ``PaddedTensor``: the rules of both layouts, on its table."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.layers import Entrywise, implement_entrywise
from subclasses.ragged.padded.rows import check_rows_match, shown
from subclasses.ragged.padded.tensor import PaddedTensor
from subclasses.ragged.sdpa import score_mask

# ---- matrix products -------------------------------------------------------------------------------------------


def _multiply(func: Any, input: Any, other: Any) -> Any:
    """A product by tables: the ragged dimension is contracted, or stays where it is."""
    n = max(input.dim(), other.dim())
    for t in (input, other):
        matrix = t.dim() == 2 and not isinstance(t, PaddedTensor)
        if (t.dim() != n and not matrix) or (
            isinstance(t, PaddedTensor) and t.batch_dim >= n - 2 and not t.merged
        ):
            raise DispatchError(
                f"{func.__name__}: {shown(input)} and {shown(other)}; expected as many dimensions, or a matrix, and "
                f"the batch dimension before the last two"
            )
    ragged = [(t, t.ragged_dim) for t in (input, other) if isinstance(t, PaddedTensor)]
    if len(ragged) == 2:
        if (ragged[0][1], ragged[1][1]) != (n - 1, n - 2) and not ragged[0][1] == ragged[1][1] < n - 2:
            raise DispatchError(
                f"{func.__name__}: the product of {shown(input)} and {shown(other)} would have two ragged dimensions; "
                f"use F.scaled_dot_product_attention, or x.to_dense() with x.mask()"
            )
        _check_operands(func, input, other)
    elif ragged[0][1] == (n - 1 if ragged[0][0] is input else n - 2):
        raise DispatchError(
            f"{func.__name__}: {shown(input)} and {shown(other)} are contracted along rows of other lengths; make both "
            f"PaddedTensors with the same lengths"
        )
    a, b = (t.to_dense() if isinstance(t, PaddedTensor) else t for t in (input, other))
    x, place = ragged[0]
    contracted = x is input and place == n - 1
    product = torch.matmul(a, b)
    return x.per_row(product, x.batch_dim) if contracted else x.like_dense(product)


def _check_operands(func: Any, a: PaddedTensor, b: PaddedTensor) -> None:
    if (a.batch_dim != b.batch_dim and not (a.merged and b.merged)) or a.shape[a.ragged_dim] != b.shape[
        b.ragged_dim
    ]:
        raise DispatchError(
            f"{func.__name__}: {shown(a)} and {shown(b)} have their rows at other places; use transpose and to_padded"
        )
    check_rows_match(func, a, b)


# ---- the rules -------------------------------------------------------------------------------------------------

ENTRYWISE = Entrywise(
    rows=lambda x: (x.batch_dim, x.ragged_dim),
    gaps=lambda x: True,
    clean=PaddedTensor.to_dense,
    cut=PaddedTensor.like_dense,
    stored=lambda x: x.unwrap("padded"),
    wrap=PaddedTensor.with_padded,
    shown=shown,
)
implement_entrywise(PaddedTensor, ENTRYWISE, _multiply)


# ---- attention -------------------------------------------------------------------------------------------------


@PaddedTensor.implements(F.scaled_dot_product_attention)
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
        if not isinstance(x, PaddedTensor) or (x.batch_dim, x.ragged_dim) != (0, x.dim() - 2) or x.dim() < 3:
            raise DispatchError(
                f"{func.__name__}: expected padded query, key and value [B, ..., T, D], got {shown(x)}; transpose so "
                f"that the batch dimension is first and the ragged one the last but one"
            )
    _check_operands(func, key, value)
    if query.shape[0] != key.shape[0]:
        raise ValueError(f"{func.__name__}: {shown(query)} and {shown(key)} have other numbers of rows")
    dense = (x.to_dense() for x in (query, key, value))
    mask = score_mask(query, key, attn_mask, is_causal)
    out = func(*dense, attn_mask=mask, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa)
    # A row without keys attended to padding, so that nothing is NaN on the way back; its result is 0.
    found = (key.lengths > 0).view(-1, *[1] * (out.dim() - 1))
    return query.like_dense(torch.where(found, out, 0))
