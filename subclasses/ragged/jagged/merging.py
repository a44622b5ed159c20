"""Merging and unmerging the batch and the ragged dimension of a ``JaggedTensor``, and views with another size.

Below autograd ``view`` keeps the rows. Above autograd it merges or unmerges the batch and the ragged dimension, which
changes the outer size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.base import name_of, outer_dims, shown, unruled
from subclasses.ragged.jagged.sharing import sharing
from subclasses.ragged.registry import Rules

if TYPE_CHECKING:
    from subclasses.ragged.jagged import JaggedTensor

RULES = Rules()
aten = torch.ops.aten

# ---- below autograd: rows stay ---------------------------------------------------------------------------------


@RULES.of(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)
def _view_below(op: Any, x: JaggedTensor, size: Sequence[int], stride: Any = None) -> Any:
    ragged_dim, values, before = _ragged_dim_of_view(x, size), x._raw_values, x.ragged_dim
    if ragged_dim is None:
        raise _cannot_view(op, x, size)
    wanted = [*size[min(before, 1) : ragged_dim], values.size(max(before - 1, 0)), *size[ragged_dim + 1 :]]
    # `view` returns a view. For the other ops PyTorch has checked that a view is possible, or expects none.
    return x.with_values(
        values.view(wanted) if op is aten.view.default else values.reshape(wanted), ragged_dim
    )


def _ragged_dim_of_view(x: JaggedTensor, size: Sequence[int]) -> int | None:
    """Returns the ragged dimension of a view of ``x`` with another size; None if there is none."""
    ragged_dim = x.ragged_dim
    if not size or size[0] != unruled(Tensor.size, x, 0):
        return None
    if ragged_dim == 0:
        return 0
    before = math.prod(x.shape[1:ragged_dim]) if ragged_dim > 1 else 1
    for dim in range(1, len(size)):
        # The extents before it are compared first: comparing other extents with T would add a guard on T.
        if math.prod(size[1:dim]) == before and size[dim] == x.max_length:
            return dim
    return None


def _cannot_view(func: Any, x: JaggedTensor, size: Sequence[int]) -> DispatchError:
    return DispatchError(
        f"{name_of(func)}: cannot view {shown(x)} as {list(size)}: the batch and ragged extents stay, or are merged by "
        "flatten(0, 1) or view(-1, ...), and unmerged by unflatten(0, (B, T))",
        code="row-dims",
    )


# ---- above autograd: merging batch and ragged dimension ---------------------------------------------------------


@RULES.of(torch.flatten)
def _flatten(func: Any, x: JaggedTensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = (outer_dims(func, x, d)[0] for d in (start_dim, end_dim))
    if x.ragged_dim == 0 and start == 0 < end:
        return _view(func, x, [-1, *x.shape[end + 1 :]])
    if x.ragged_dim == 0 or start > 0 or end == 0:
        return unruled(func, x, start_dim, end_dim)
    joined = math.prod(x.shape[2 : end + 1])
    if x.ragged_dim != 1 or end > 1:
        raise _cannot_view(func, x, [x.shape[0] * x.shape[1] * joined, *x.shape[end + 1 :]])
    return merge(x)


@RULES.of(torch.unflatten)
def _unflatten(func: Any, x: JaggedTensor, dim: int, sizes: Sequence[int]) -> Any:
    (dim,) = outer_dims(func, x, dim)
    if x.ragged_dim == 0 and dim == 0:
        return _view(func, x, [*sizes, *x.shape[1:]])
    known, size = -math.prod(sizes), list(x.shape)
    # Splitting a dimension is a view.
    size[dim : dim + 1] = [size[dim] // known if n == -1 else n for n in sizes]
    return unruled(Tensor.view, x, size)


@RULES.of(torch.Tensor.view, torch.reshape)
def _view_above(func: Any, x: JaggedTensor, *size: Any) -> Any:
    if len(size) == 1 and isinstance(size[0], torch.dtype | Sequence):
        (size,) = size
    return unruled(func, x, size) if isinstance(size, torch.dtype) else _view(func, x, list(size))


@RULES.of(torch.Tensor.view_as, torch.Tensor.reshape_as)
def _view_as(func: Any, x: Any, other: Tensor) -> Any:
    return x.reshape(other.shape)


def merge(x: JaggedTensor) -> JaggedTensor:
    """Merges the batch and the ragged dimension into one, which has the existing entries."""
    return sharing(x.with_values(x.unwrap("values"), 0), x)


def _view(func: Any, x: JaggedTensor, size: list[Any]) -> Any:
    if x.ragged_dim == 0:
        return _view_merged(func, x, size)
    rest = _entry_size(x)
    if x.ragged_dim == 1 and size and _product(size[1:]) == rest and not _keeps_rows(x, size):
        return (
            merge(x)
            if len(size) == x.dim() - 1 and size[1:] == list(x.shape[2:])
            else _resize(merge(x), size)
        )
    if size and size[0] == -1:
        size = [x.shape[0], *size[1:]]
    if -1 in size:
        unknown = size.index(-1)
        if type(size[0]) is int and type(x.shape[0]) is int and size[0] != x.shape[0]:
            raise _cannot_view(func, x, size)
        # No comparison with an extent here: an extent that contains `T` would add a guard on `T`.
        size[unknown] = rest * x.max_length // _product(size[1:unknown] + size[unknown + 1 :])
    return unruled(func, x, size)


def _view_merged(func: Any, x: JaggedTensor, size: list[Any]) -> Any:
    rest, rows = _entry_size(x), x.offsets.shape[0] - 1
    # Rows of one entry have the size of entries with one more dimension. A size that begins with the extents of the
    # rows returns rows.
    means_rows = _product(size[2:]) == rest and size[:2] == [rows, x.max_length]
    if size and _product(size[1:]) == rest and not means_rows:
        return _resize(x, size)
    if size and -1 in size[1:] and size[0] is x.shape[0]:
        return _resize(x, size)
    parts = _product(size[1:])
    if size and size[0] == -1 and parts > 0 and rest % parts == 0 and x.lengths is None:
        return _split_entries(x, size, rest // parts)
    if len(size) > 1 and size[0] in (-1, rows) and size[1] in (-1, x.max_length):
        values = x.unwrap("values")
        return sharing(x.with_values(values.reshape(values.shape[0], *size[2:]), 1), x)
    raise _cannot_view(func, x, size)


def _resize(x: JaggedTensor, size: list[Any]) -> JaggedTensor:
    """Returns merged entries of another size."""
    values = x.unwrap("values")
    return sharing(x.with_values(values.reshape(values.shape[0], *size[1:]), 0), x)


def _split_entries(x: JaggedTensor, size: list[Any], parts: Any) -> JaggedTensor:
    """Splits each merged entry into several; only without holes, so that the number of entries is an extent."""
    values = x.unwrap("values").reshape(size)
    offsets, width = x.offsets * parts, x.max_length * parts
    split = type(x)(values, offsets, count=x.count, ragged_dim=0, max_length=width)
    return sharing(split, x)


def _entry_size(x: JaggedTensor) -> Any:
    """Returns the number of elements in one entry."""
    size, values_dim = x._raw_values.shape, max(x.ragged_dim - 1, 0)
    return math.prod(size[:values_dim]) * math.prod(size[values_dim + 1 :])


def _keeps_rows(x: JaggedTensor, size: list[Any]) -> bool:
    return (
        len(size) > 1 and (size[0] is x.shape[0] or size[0] == x.shape[0]) and size[1] in (-1, x.max_length)
    )


def _product(extents: list[Any]) -> Any:
    """Returns the product of extents; -1 if an extent is unknown."""
    return -1 if -1 in extents else math.prod(extents)
