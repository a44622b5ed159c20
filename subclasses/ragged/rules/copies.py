"""Copies and aliases of ragged tensors, factories of others like them, and writes.

A copy has its own stored tensor, and shares the tensors of offsets and lengths. No op writes to these, so the rows of a
value and its copy match without a comparison.
"""

from __future__ import annotations

from typing import Any

import torch

from subclasses.errors import DispatchError
from subclasses.ragged.base import is_ragged, shown
from subclasses.ragged.registry import Rules

RULES = Rules()
aten = torch.ops.aten

# ---- which ops -------------------------------------------------------------------------------------------------

LIKENESSES = (
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten._to_copy.default,
)


# Ops that overwrite a tensor with random numbers.
DRAWN = (
    aten.bernoulli_.float,
    aten.cauchy_.default,
    aten.exponential_.default,
    aten.geometric_.default,
    aten.log_normal_.default,
    aten.normal_.default,
    aten.random_.default,
    getattr(aten.random_, "from"),
    aten.random_.to,
    aten.uniform_.default,
)

# ---- copies ----------------------------------------------------------------------------------------------------


@RULES.of(*LIKENESSES)
def copy_stored(op: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the op on the stored tensor; the rows move with it to another device."""
    stored = x.stored
    formats = (torch.channels_last, torch.channels_last_3d)
    if kwargs.get("memory_format") in formats and stored.dim() != x.dim():
        kwargs["memory_format"] = torch.preserve_format  # these formats depend on the rank
    result = op(stored, *args, **kwargs)
    return x.with_stored(result) if result.device == x.device else x.moved(result)


@RULES.of(aten.new_empty_strided.default)
def new_empty_strided(op: Any, x: Any, size: Any, stride: Any, **kwargs: Any) -> Any:
    """Returns a ragged tensor for the size of ``x``, since autograd writes a cotangent to it, else a dense one."""
    if tuple(size) == tuple(x.shape):
        return x.with_stored(torch.empty_like(x.stored, **kwargs))
    return op(x.stored, size, stride, **kwargs)


@RULES.of(aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default)
def new_dense(op: Any, x: Any, size: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns dense tensors of the same dtype and device; `zeros_like` and similar functions return ragged ones."""
    return op(x.stored, size, *args, **kwargs)


# ---- writes ----------------------------------------------------------------------------------------------------


@RULES.of(aten.copy_.default)
def copy_into(op: Any, x: Any, source: Any, non_blocking: bool = False) -> Any:
    """Copies ``source`` into existing entries."""
    if not is_ragged(x):
        raise DispatchError(
            f"{op}: cannot write {shown(source)} into a dense tensor",
            code="write-misfit",
            hint="use to_dense()",
        )
    x.write(op, x.beside(op, source), non_blocking)
    return x


@RULES.of(*DRAWN)
def draw(op: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Writes random numbers into existing entries."""
    x.write(op, op(torch.empty_like(x.stored), *args, **kwargs), False)
    return x


# ---- sizes -----------------------------------------------------------------------------------------------------


@RULES.of(aten.size.default, aten.stride.default)
def sizes(op: Any, x: Any) -> Any:
    """Returns the size or the stride, which autograd reads for a cotangent of zeros if sizes are symbols."""
    return list(x.size() if op is aten.size.default else x.stride())


@RULES.of(aten._is_any_true.default, aten._is_all_true.default)
def is_true(op: Any, x: Any) -> Any:
    """Reduces existing entries; autograd calls these ops in anomaly mode to find a NaN in a gradient."""
    return op(x.to_dense(fill=op is aten._is_all_true.default))
