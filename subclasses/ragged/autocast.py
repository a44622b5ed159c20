"""Autocast for rules above autograd.

A rule for a Python-level function runs above autograd, where PyTorch has not cast the operands yet. A rule that passes
its operands to that function needs no cast: PyTorch casts them in the call, and caches the casts of parameters. The
rules of the functions below call other ops. `following_autocast` casts their operands as the autocast kernel of the
function does. Then the rule runs with autocast disabled, as PyTorch's kernel does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subclasses.ragged.base import first_ragged

# Functions whose operands autocast casts to its dtype.
LOWER = frozenset({"addmm", "baddbmm", "flex_attention", "linalg_vecdot", "scaled_dot_product_attention"})

# Functions whose operands autocast casts to float32: on every device, on the CPU, on other devices.
WIDE = frozenset({"cosine_embedding_loss", "margin_ranking_loss", "triplet_margin_loss"})
WIDE_ON_CPU = frozenset({"nanquantile", "quantile"})
WIDE_ELSEWHERE = frozenset({"cosine_similarity", "group_norm", "sum"})

# Functions whose operands autocast does not cast, and whose rules call functions whose operands it casts.
UNCHANGED = frozenset({"adaptive_avg_pool1d", "embedding_bag"})

NAMES = LOWER | WIDE | WIDE_ON_CPU | WIDE_ELSEWHERE | UNCHANGED


def following_autocast(functions: tuple[Any, ...], rule: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a rule that casts its operands as autocast casts dense operands of the functions."""
    if not any(getattr(f, "__name__", "") in NAMES for f in functions):
        return rule

    @functools.wraps(rule)
    def following(func: Any, *args: Any, **kwargs: Any) -> Any:
        device = first_ragged((*args, *kwargs.values())).stored.device.type
        if func.__name__ not in NAMES or not _is_enabled(device):
            return rule(func, *args, **kwargs)
        dtype = _target_dtype(func.__name__, device, kwargs)
        with torch.autocast(device, enabled=False):
            args = tuple([_cast(a, device, dtype) for a in args])
            return rule(func, *args, **{k: _cast(a, device, dtype) for k, a in kwargs.items()})

    return following


def autocast_operands(device: str, *operands: Tensor) -> tuple[Tensor, ...]:
    """Returns the operands of an op of the lower precision as autocast casts them, where it is enabled."""
    if not _is_enabled(device):
        return operands
    return tuple([_cast(t, device, torch.get_autocast_dtype(device)) for t in operands])


def _is_enabled(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _target_dtype(name: str, device: str, options: dict[str, Any]) -> torch.dtype | None:
    """Returns the dtype to which autocast casts the operands of a function; None if it does not cast them."""
    if name in LOWER:
        return torch.get_autocast_dtype(device)
    wide = name in WIDE or name in (WIDE_ON_CPU if device == "cpu" else WIDE_ELSEWHERE)
    return torch.float32 if wide and options.get("dtype") is None else None


def _cast(a: Any, device: str, dtype: torch.dtype | None) -> Any:
    is_cast = dtype is not None and isinstance(a, Tensor) and a.device.type == device
    return a.to(dtype) if is_cast and a.is_floating_point() and a.dtype is not torch.float64 else a
