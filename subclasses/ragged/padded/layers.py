"""Layers, matrix products and attention.

The padding is zero on the way in, so that no parameter's gradient reads it, and cut off on the way out, so that no
cotangent comes back from it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.padded.rows import check_rows_match, shown
from subclasses.ragged.padded.tensor import PaddedTensor
from subclasses.ragged.sdpa import score_mask

# ---- one layer, entry by entry ---------------------------------------------------------------------------------


@PaddedTensor.implements(F.linear)
def _(func: Any, input: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    _check_dense(func, weight, bias)
    _check_features(func, input, 1)
    return input.like_dense(func(input.to_dense(), weight, bias))


@PaddedTensor.implements(F.embedding)
def _(  # noqa: PLR0913
    func: Any,
    input: Any,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    _check_dense(func, weight)
    if max_norm is not None or scale_grad_by_freq:
        raise DispatchError(
            f"{func.__name__}: max_norm and scale_grad_by_freq look at all indices of the table of {shown(input)}, the "
            f"padding's as well; use x.to_jagged()"
        )
    return input.like_dense(func(input.to_dense(), weight, padding_idx, None, norm_type, False, sparse))


@PaddedTensor.implements(F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm)
def _(func: Any, input: Any, normalized_shape: Any, *args: Any, **kwargs: Any) -> Any:
    _check_dense(func, *args, *kwargs.values())
    _check_features(func, input, len(normalized_shape))
    return input.like_dense(func(input.to_dense(), normalized_shape, *args, **kwargs))


@PaddedTensor.implements(F.dropout, F.alpha_dropout, F.rrelu, torch.dropout, torch.alpha_dropout, torch.rrelu)
def _(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    return input.with_padded(func(input.unwrap("padded"), *args, **kwargs))


def _check_dense(func: Any, *parameters: Any) -> None:
    for p in parameters:
        if isinstance(p, PaddedTensor):
            raise DispatchError(f"{func.__name__}: expected dense parameters, got {shown(p)}")


def _check_features(func: Any, x: Any, count: int) -> None:
    """Raises unless the last dimensions are those of an entry."""
    if not isinstance(x, PaddedTensor) or max(x.ragged_dim, x.batch_dim) >= x.dim() - count:
        raise DispatchError(
            f"{func.__name__}: works along the last {count} dimensions, and {shown(x)} has its rows along one of them; "
            f"swap them by transpose"
        )


# ---- matrix products -------------------------------------------------------------------------------------------


@PaddedTensor.implements(torch.bmm, torch.mm)
def _(func: Any, input: Any, mat2: Any) -> Any:
    return torch.matmul(input, mat2)


@PaddedTensor.implements(torch.matmul)
def _(func: Any, input: Any, other: Any) -> Any:
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
