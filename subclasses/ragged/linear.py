"""Matrix products, embeddings and other layers that treat each entry alike."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.rows import shown

# ---- one layer, entry by entry ---------------------------------------------------------------------------------


@JaggedTensor.implements(F.linear)
def _(func: Any, input: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    _check_dense(func, weight, bias)
    _check_features(func, input, 1)
    return entrywise(input, func(input.clean_values(), weight, bias))


@JaggedTensor.implements(F.embedding)
def _(func: Any, input: Any, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    _check_dense(func, weight)
    return entrywise(input, func(input.kept(input.values), weight, *args, **kwargs))


@JaggedTensor.implements(F.layer_norm, F.rms_norm)
def _(func: Any, input: Any, normalized_shape: Any, *args: Any, **kwargs: Any) -> Any:
    _check_features(func, input, len(normalized_shape))
    return entrywise(input, func(input.clean_values(), normalized_shape, *args, **kwargs))


@JaggedTensor.implements(F.dropout, F.alpha_dropout, torch.dropout, torch.alpha_dropout)
def _(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    return entrywise(input, func(input.clean_values(), *args, **kwargs))


def entrywise(x: JaggedTensor, values: Tensor) -> JaggedTensor:
    """What a layer made of clean values; no cotangent of a hole comes back to the layer's parameters."""
    return x.with_values(x.kept(values))


def _check_dense(func: Any, *parameters: Any) -> None:
    for p in parameters:
        if isinstance(p, JaggedTensor):
            raise DispatchError(f"{func.__name__}: expected dense parameters, got {shown(p)}")


def _check_features(func: Any, x: JaggedTensor, count: int) -> None:
    """Raises unless the last dimensions are those of an entry."""
    if x.ragged_dim >= x.dim() - count:
        raise DispatchError(
            f"{func.__name__}: works along the last {count} dimensions, and {shown(x)} is ragged along one of them; "
            f"swap them by transpose"
        )
