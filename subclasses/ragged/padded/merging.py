"""Merged dimensions: the dimensions of the rows in a view of a table with another size.

``x.flatten(0, 1)``, ``x.view(-1, D)`` and similar views merge the batch and the ragged dimension. The merged dimension
has a position for each position of the table, padding included. The lengths determine which entries exist, and how to
unmerge the rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.base import name_of, outer_dims, rows_stay, shown, unruled
from subclasses.ragged.padded.tensor import PaddedTensor
from subclasses.ragged.registry import Rules

RULES = Rules()
aten = torch.ops.aten

# ---- dimensions of the rows ------------------------------------------------------------------------------------


def dims_after(func: Any, x: PaddedTensor, size: list[int]) -> tuple[int, int]:
    """Returns the ragged and the batch dimension of a view of a table with another size.

    Raises:
        DispatchError: rows would be cut, or merged with something else.
    """
    dims = _after_merged(x, size) if x.merged else _after_rows(x, size)
    if dims is None:
        raise DispatchError(
            f"{name_of(func)}: cannot view {shown(x)} as {size}: batch and ragged dimension stay, or are merged where "
            "one follows the other, with dimensions of the entries before and behind them",
            code="row-dims",
            hint="x.to_dense(), x.to_tensors() and x.to_jagged() give tensors without this limit",
        )
    return dims


def _after_rows(x: PaddedTensor, size: list[int]) -> tuple[int, int] | None:
    ragged, batch = _dim_after(x, x.ragged_dim, size), _dim_after(x, x.batch_dim, size)
    if ragged is not None and batch is not None and (ragged < batch) == (x.ragged_dim < x.batch_dim):
        # Two adjacent dimensions of extent 1 are merged if the size has only one of them.
        return None if ragged == batch and x.ragged_dim != x.batch_dim + 1 else (ragged, batch)
    if x.ragged_dim != x.batch_dim + 1:
        return None
    before, behind = math.prod(x.shape[: x.batch_dim]), math.prod(x.shape[x.ragged_dim + 1 :])
    for d, n in enumerate(size):
        merged = n == x.shape[x.batch_dim] * x.shape[x.ragged_dim]
        if merged and math.prod(size[:d]) == before and math.prod(size[d + 1 :]) == behind:
            return d, d
    return None


def _after_merged(x: PaddedTensor, size: list[int]) -> tuple[int, int] | None:
    dim, rows = x.batch_dim, [x.lengths.shape[0], x.width]
    if size == [*x.shape[:dim], *rows, *x.shape[dim + 1 :]]:
        return dim + 1, dim
    before, behind = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 :])
    # Rows of one position have the size of entries with one more dimension. A size that contains the extents of the
    # rows returns rows.
    for d in range(len(size) - 1):
        if size[d : d + 2] == rows and math.prod(size[:d]) == before and math.prod(size[d + 2 :]) == behind:
            return d + 1, d
    merged_dim = _dim_after(x, dim, size)
    return None if merged_dim is None else (merged_dim, merged_dim)


def _dim_after(x: PaddedTensor, dim: int, size: list[int]) -> int | None:
    """Returns the index of a dimension in a view of the table with another size; None if it is absent or ambiguous."""
    behind = x.dim() - dim - 1
    if list(x.shape[: dim + 1]) == size[: dim + 1]:
        return dim
    if list(x.shape[dim:]) == size[len(size) - behind - 1 :]:
        return len(size) - behind - 1
    before = math.prod(x.shape[:dim])
    dims = [d for d, n in enumerate(size) if n == x.shape[dim] and math.prod(size[:d]) == before]
    return dims[0] if len(dims) == 1 else None


# ---- below autograd --------------------------------------------------------------------------------------------


@RULES.of(aten.t.default)
def _t(op: Any, x: PaddedTensor) -> Any:
    return x.with_padded(x._raw_padded.t(), 1 - x.ragged_dim, 1 - x.batch_dim)


@RULES.of(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)
def _view(op: Any, x: PaddedTensor, size: Sequence[int], stride: Any = None) -> Any:
    size = list(size)
    if -1 in size:
        unknown = size.index(-1)
        rest = math.prod(size[:unknown] + size[unknown + 1 :])
        size[unknown] = x.numel() // rest if rest else 0
    dims = dims_after(op, x, size)
    # `view` returns a view. For the other ops PyTorch has checked that a view is possible, or expects none.
    padded = x._raw_padded.view(size) if op is aten.view.default else x._raw_padded.reshape(size)
    return x.with_padded(padded, *dims)


# ---- above autograd: functions of dimensions -------------------------------------------------------------------


@RULES.of(torch.flatten)
def _flatten(func: Any, x: PaddedTensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = (outer_dims(func, x, d)[0] for d in (start_dim, end_dim))
    merges = (start, end) == (x.batch_dim, x.ragged_dim) and end == start + 1
    # If each row has one position, and entries have extent 1, the size does not determine which of the two is merged.
    if merges and x.shape[end] == 1 and list(x.shape[end + 1 : end + 2]) == [1]:
        return x.merge()
    return unruled(func, x, start, end)


@RULES.of(torch.unflatten)
def _unflatten(func: Any, x: PaddedTensor, dim: int, sizes: Sequence[int]) -> Any:
    (dim,) = outer_dims(func, x, dim)
    if not x.merged and not rows_stay(x, [dim]):
        x.feature_dim(func.__name__, dim)  # which raises
    known = -math.prod(sizes)
    parts = [x.shape[dim] // known if n == -1 else n for n in sizes]
    # Splitting a dimension is a view.
    return unruled(Tensor.view, x, [*x.shape[:dim], *parts, *x.shape[dim + 1 :]])
