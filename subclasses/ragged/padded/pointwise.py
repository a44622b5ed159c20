"""Pointwise ops and copies: the same op on the table, whatever the padding holds.

They run below autograd, so that each is one node in the autograd graph as for plain tensors. Operands are aligned
above it, since a cotangent comes back as the result is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.padded.rows import aligned, as_wide, check_fits, first_padded, shown
from subclasses.ragged.padded.tensor import PaddedTensor
from subclasses.ragged.pointwise import FUNCTIONS, UNTAGGED

aten = torch.ops.aten

# ---- below autograd --------------------------------------------------------------------------------------------


@PaddedTensor.implements(torch.Tag.pointwise, *UNTAGGED)
def _(op: Any, *args: Any, **kwargs: Any) -> Any:
    x = first_padded((*args, *kwargs.values()))
    result = op(*(_table(op, x, a) for a in args), **{k: _table(op, x, a) for k, a in kwargs.items()})
    if isinstance(result, tuple):
        return tuple(x.with_padded(part) for part in result)
    return x.with_padded(result)


def _table(op: Any, x: PaddedTensor, a: Any) -> Any:
    """What stands beside ``x``, as it stands beside its table."""
    if a is x:
        return x.padded
    if isinstance(a, Tensor):
        check_fits(op, x, a)
    if isinstance(a, PaddedTensor):
        return as_wide(x, a).padded
    return a


# ---- above autograd --------------------------------------------------------------------------------------------


@PaddedTensor.implements(*FUNCTIONS)
def _(func: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) + len(kwargs) == 1:
        return PaddedTensor.unruled(func, *args, **kwargs)
    x = first_padded((*args, *kwargs.values()))
    written = args[0] if args and func.__name__.endswith("_") else None
    if written is not None and not isinstance(written, PaddedTensor):
        raise DispatchError(f"{func.__name__}: cannot write {shown(x)} into {shown(written)}; use to_dense()")

    def settle(a: Any) -> Any:
        return aligned(func, x, a) if isinstance(a, Tensor) and a is not x else a

    return PaddedTensor.unruled(func, *map(settle, args), **{k: settle(a) for k, a in kwargs.items()})


# ---- copies ----------------------------------------------------------------------------------------------------


@PaddedTensor.implements(
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
    aten.zero.default,
)
def _(op: Any, x: PaddedTensor, *args: Any, **kwargs: Any) -> Any:
    """The lengths are never written to: a copy keeps the very same tensor, which proves that rows match."""
    padded = op(x.padded, *args, **kwargs)
    if padded.device == x.device:
        return x.with_padded(padded)
    row_count = None if x.row_count is None else x.row_count.to(padded.device)
    return x.with_lengths(padded, x.lengths.to(padded.device), row_count)


@PaddedTensor.implements(aten.new_empty_strided.default)
def _(op: Any, x: PaddedTensor, size: Any, stride: Any, **kwargs: Any) -> Any:
    """Autograd asks for one like another, to write a cotangent to; any other size is that of a dense tensor."""
    table = op(x.padded, size, stride, **kwargs)
    return x.with_padded(table) if tuple(size) == tuple(x.shape) else table


@PaddedTensor.implements(
    aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default
)
def _(op: Any, x: PaddedTensor, size: Any, *args: Any, **kwargs: Any) -> Any:
    return op(x.padded, size, *args, **kwargs)


@PaddedTensor.implements(aten.copy_.default)
def _(op: Any, x: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(x, PaddedTensor):
        raise DispatchError(f"{op}: cannot write {shown(source)} into a dense tensor; use to_dense()")
    x.padded.copy_(_table(op, x, source), non_blocking)
    return x


@PaddedTensor.implements(aten.size.default, aten.stride.default)
def _(op: Any, x: PaddedTensor) -> Any:
    """Autograd asks in this way where sizes are symbols, for a cotangent of zeros."""
    return list(x.size() if op is aten.size.default else x.stride())
