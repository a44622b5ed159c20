"""Copies and aliases: the values are copied, what says where the rows lie is shared.

Offsets and lengths are never written to, so a copy keeps the very same tensors, and ops on a value and its copy know
that their rows match.
"""

from __future__ import annotations

from typing import Any

import torch

from subclasses.errors import DispatchError
from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.rows import matched_values, shown

aten = torch.ops.aten

# ---- copies ----------------------------------------------------------------------------------------------------


@JaggedTensor.implements(aten.detach.default, aten.alias.default, aten.clone.default)
def _(op: Any, x: JaggedTensor, **kwargs: Any) -> Any:
    return x.with_values(op(x.values, **_without_format(kwargs)))


def _without_format(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A memory format that depends on the rank means nothing for the values, whose rank is another."""
    if kwargs.get("memory_format") in (torch.channels_last, torch.channels_last_3d):
        return kwargs | {"memory_format": torch.preserve_format}
    return kwargs


@JaggedTensor.implements(
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten._to_copy.default,
    aten.zero.default,
)
def _(op: Any, x: JaggedTensor, *args: Any, **kwargs: Any) -> Any:
    values = op(x.values, *args, **_without_format(kwargs))
    if values.device == x.device:
        return x.with_values(values)
    lengths = None if x.lengths is None else x.lengths.to(values.device)
    return type(x)(
        values,
        x.offsets.to(values.device),
        lengths=lengths,
        ragged_dim=x.ragged_dim,
        max_length=x.max_length,
    )


@JaggedTensor.implements(aten.new_empty_strided.default)
def _(op: Any, x: JaggedTensor, size: Any, stride: Any, **kwargs: Any) -> Any:
    """Autograd asks for one like another, to write a cotangent to; any other size is that of a dense tensor."""
    if tuple(size) == tuple(x.shape):
        return x.with_values(torch.empty_like(x.values, **kwargs))
    return op(x.values, size, stride, **kwargs)


@JaggedTensor.implements(
    aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default
)
def _(op: Any, x: JaggedTensor, size: Any, *args: Any, **kwargs: Any) -> Any:
    """Dense tensors of the same dtype and device; `zeros_like` and the like give ragged ones."""
    return op(x.values, size, *args, **kwargs)


@JaggedTensor.implements(aten.copy_.default)
def _(op: Any, x: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(x, JaggedTensor):
        raise DispatchError(f"{op}: cannot write {shown(source)} into a dense tensor; use to_dense()")
    values = (
        matched_values(op, x, source) if isinstance(source, JaggedTensor) else x.like_dense(source).values
    )
    x.values.copy_(values, non_blocking)
    return x


# ---- sizes -----------------------------------------------------------------------------------------------------


@JaggedTensor.implements(aten.size.default, aten.stride.default)
def _(op: Any, x: JaggedTensor) -> Any:
    """Autograd asks in this way where sizes are symbols, for a cotangent of zeros."""
    return list(x.size() if op is aten.size.default else x.stride())
