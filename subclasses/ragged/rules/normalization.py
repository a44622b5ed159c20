"""Normalisations over groups of channels and over the batch, and bags of embeddings; each is a few ops with rules.

Channels are dimension 1, as PyTorch has it: ``[B, C, T]`` with the ragged dimension after them, or ``[N, C]`` of merged
dimensions, where each entry is a row of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.base import first_ragged, is_ragged, shown
from subclasses.ragged.registry import Rules
from subclasses.ragged.segments import sum_dtype

RULES = Rules()

# ---- normalisations --------------------------------------------------------------------------------------------


@RULES.of(F.group_norm, torch.group_norm)
def _group_norm(  # noqa: PLR0913
    func: Any,
    input: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    _check_channels(func, input)
    return _normalized_in_groups(input, num_groups, weight, bias, eps)


def _normalized_in_groups(x: Any, num_groups: int, weight: Any, bias: Any, eps: float) -> Any:
    if x.shape[1] % num_groups:
        raise RuntimeError(f"group_norm: {x.shape[1]} channels do not make {num_groups} groups of equal size")
    groups = x.to(sum_dtype(x.dtype)).unflatten(1, (num_groups, -1))
    dims = tuple(range(2, groups.dim()))
    mean, var = groups.mean(dims, keepdim=True), groups.var(dims, correction=0, keepdim=True)
    normal = (groups - mean) * (var + eps).rsqrt()
    return _scaled(normal.flatten(1, 2), weight, bias).to(x.dtype)


@RULES.of(F.instance_norm)
def _instance_norm(  # noqa: PLR0913
    func: Any,
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    _check_channels(func, input)
    if running_mean is not None or running_var is not None or not use_input_stats:
        raise DispatchError(
            "instance_norm: ragged rows are normalised by their own mean and variance only",
            code="argument-refused",
        )
    return _normalized_in_groups(input, input.shape[1], weight, bias, eps)


@RULES.of(F.batch_norm)
def _batch_norm(  # noqa: PLR0913
    func: Any,
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    _check_channels(func, input)
    wide = input.to(sum_dtype(input.dtype))
    if training:
        dims = tuple(d for d in range(input.dim()) if d != 1)
        mean, var = wide.mean(dims), wide.var(dims, correction=0)
        with torch.no_grad():
            for running, now in ((running_mean, mean), (running_var, wide.var(dims, correction=1))):
                if running is not None:
                    running.lerp_(now.to(running.dtype), momentum)
    else:
        mean, var = running_mean, running_var
    normal = (wide - _of_channels(input, mean)) * (_of_channels(input, var) + eps).rsqrt()
    return _scaled(normal, weight, bias).to(input.dtype)


def _check_channels(func: Any, x: Any) -> None:
    """Raises unless dimension 1 is a dimension of the entries."""
    if not is_ragged(x) or x.dim() < 2 or 1 in x.row_dims:
        raise DispatchError(
            f"{func.__name__}: expected channels in dimension 1 of the entries, got {shown(x)}",
            code="row-dims",
            hint="write x.transpose(1, 2), or x.flatten(0, 1)",
        )


def _scaled(x: Any, weight: Any, bias: Any) -> Any:
    x = x if weight is None else x * _of_channels(x, weight)
    return x if bias is None else x + _of_channels(x, bias)


def _of_channels(x: Any, t: Tensor) -> Tensor:
    """Reshapes ``[C]`` to broadcast against ``[B, C, ...]``."""
    return t.view(-1, *[1] * (x.dim() - 2))


# ---- bags ------------------------------------------------------------------------------------------------------

# Replacements of the rule below, by layout: `subclasses.keyed` has kernels for jagged rows.
kernels_of_bags: dict[type, Callable[..., Any]] = {}


@RULES.of(F.embedding_bag)
def _embedding_bag(func: Any, *args: Any, **kwargs: Any) -> Any:
    x = first_ragged((*args, *kwargs.values()))
    kernel = _pool_bags if x.row_count is not None else kernels_of_bags.get(x.ragged_class, _pool_bags)
    return kernel(func, *args, **kwargs)


def _pool_bags(  # noqa: PLR0913
    func: Any,
    input: Any,
    weight: Any,
    offsets: Any = None,
    max_norm: Any = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    if not is_ragged(input) or input.dim() != 2 or offsets is not None or include_last_offset:
        raise DispatchError(
            f"embedding_bag: expected indices [B, T], each row of which is a bag, and no offsets, got {shown(input)}",
            code="argument-refused",
        )
    if mode not in ("sum", "mean", "max"):
        raise ValueError(f"embedding_bag: expected mode 'sum', 'mean' or 'max', got {mode!r}")
    if per_sample_weights is not None and mode != "sum":
        raise DispatchError(
            f"embedding_bag: per_sample_weights go with mode='sum', got mode={mode!r}",
            code="argument-refused",
        )
    rows = F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    counted = torch.ones_like(input) if padding_idx is None else input != padding_idx % weight.shape[0]
    count = counted.sum(1).unsqueeze(-1)  # type: ignore[union-attr]
    if mode == "max":
        lowest: Any = torch.finfo(weight.dtype).min
        best = torch.where(counted.to(torch.bool).unsqueeze(-1), rows, lowest).to_dense(lowest).amax(1)
        return torch.where(count > 0, best, 0)
    total = (rows * counted.unsqueeze(-1)).sum(1)
    return total if mode == "sum" else total / count.clamp(min=1)
