"""What a mask or an index of the same rows picks from each of them: ragged results, and nothing is read.

A mask moves the entries that it picks to the front of their row; the table stays as wide as it was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.families import without_out
from subclasses.ragged.padded.cutting import beside_table, other_rows
from subclasses.ragged.padded.rows import (
    aligned,
    as_wide,
    check_rows_match,
    first_padded,
    outer_dims,
    rows_stay,
    shown,
)
from subclasses.ragged.padded.tensor import PaddedTensor

# ---- by a mask -------------------------------------------------------------------------------------------------


@PaddedTensor.implements(torch.masked_select)
def _(func: Any, input: Any, mask: Any) -> Any:
    x = first_padded((input, mask))
    input, mask = (
        t if isinstance(t, PaddedTensor) else x.like_dense(t.expand(x.shape)) for t in (input, mask)
    )
    return pick(func, input, mask)


def pick(func: Any, x: PaddedTensor, mask: PaddedTensor) -> PaddedTensor:
    """The entries that a mask picks of each row, in their order; a mask of single elements gives rows ``[n]``."""
    if x.merged and mask.merged:
        return pick(func, x.unmerged(), mask.unmerged()).merge()
    x, mask = batch_first(func, x), batch_first(func, mask)
    check_mask(func, x, mask)
    mask = as_wide(x, mask)
    if mask.dim() > 2:
        x, mask = _elements(x), _elements(mask)
    picked = mask.to_dense(False)
    order = torch.sort((~picked).to(torch.uint8), dim=1, stable=True).indices
    table = x.to_dense().gather(1, beside_table(x, order).expand(x.shape)) if x.width else x.unwrap("padded")
    return other_rows(x, table, picked.sum(1))


def check_mask(func: Any, x: PaddedTensor, mask: PaddedTensor) -> None:
    """Raises unless a mask has one element for each entry, or for each element of one."""
    if (
        mask.dtype != torch.bool
        or mask.dim() not in (2, x.dim())
        or (mask.dim() > 2 and mask.shape[2:] != x.shape[2:])
    ):
        raise DispatchError(
            f"{func.__name__}: expected a bool mask of the rows of {shown(x)}, got {shown(mask)}"
        )
    check_rows_match(func, x, mask)


def batch_first(func: Any, x: PaddedTensor) -> PaddedTensor:
    """The same rows as ``[B, T, ...]``."""
    if (x.batch_dim, x.ragged_dim) != (0, 1):
        raise DispatchError(
            f"{func.__name__}: expected rows along 0, ragged along 1, got {shown(x)}; use transpose"
        )
    return x


def _elements(x: PaddedTensor) -> PaddedTensor:
    """Every element as an entry of its own."""
    features = x.padded[:1, :1].numel() if x.padded.numel() else 0
    return x.with_lengths(x.unwrap("padded").flatten(1), x.counts * features, x.row_count)


def put_back(x: PaddedTensor, mask: PaddedTensor, values: PaddedTensor) -> Tensor:
    """The table of ``x`` with the entries that a mask picks replaced, in their order; the inverse of `pick`."""
    picked = mask.to_dense(False)
    rank = (picked.cumsum(1) - 1).clamp(min=0)
    check_rows_match(torch.Tensor.__setitem__, values, x.with_lengths(x.padded, picked.sum(1), x.row_count))
    source = as_wide(x, values).to_dense().expand(x.shape)
    return torch.where(
        beside_table(x, picked), source.gather(1, beside_table(x, rank).expand(x.shape)), x.to_dense()
    )


# ---- by an index for each entry --------------------------------------------------------------------------------


@PaddedTensor.implements(torch.gather, torch.take_along_dim)
def _(func: Any, input: Any, dim: int, index: Any, **kwargs: Any) -> Any:
    kwargs = without_out(func, input, kwargs, shown)
    if func.__name__ == "take_along_dim":
        dim, index = index, dim
    if not isinstance(input, PaddedTensor) or not isinstance(index, PaddedTensor):
        raise DispatchError(
            f"{func.__name__}: expected two padded tensors with the same rows, got {shown(input)} and {shown(index)}"
        )
    (dim,) = outer_dims(func, input, dim)
    places = (input.dim(), input.batch_dim, input.ragged_dim)
    if places != (index.dim(), index.batch_dim, index.ragged_dim) or dim == input.batch_dim:
        raise DispatchError(
            f"{func.__name__}: {shown(index)} along {dim} of {shown(input)}; rows are taken by x[rows]"
        )
    if rows_stay(input, [dim]):
        index = aligned(func, input, index)
    else:
        _check_reached(func, input, index)
    table = torch.gather(input.to_dense(), dim, index.to_dense(), **kwargs)
    return index.like_dense(table)


def _check_reached(func: Any, x: PaddedTensor, index: PaddedTensor) -> None:
    """Raises where an index lies beyond its row; nothing waits for a GPU."""
    size = [n if d == x.batch_dim else 1 for d, n in enumerate(x.shape)]
    reached = (index.padded < x.counts.view(size)) & (index.padded >= 0)
    message = f"{func.__name__}: an index lies beyond its row of {shown(x)}"
    torch.ops.aten._assert_async.msg((reached | ~index.exists).all(), message)


# ---- the largest -----------------------------------------------------------------------------------------------


@PaddedTensor.implements(torch.topk)
def _(func: Any, input: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Along the rows a row shorter than ``k`` gives all of its entries: a ragged result."""
    (dim,) = outer_dims(func, input, dim)
    if rows_stay(input, [dim]):
        found = func(input.unwrap("padded"), k, dim, largest, sorted)
        return type(found)(tuple(input.with_padded(part) for part in found))
    if dim != input.ragged_dim or input.merged:
        raise DispatchError(f"{func.__name__}: takes entries of a row, got dimension {dim} of {shown(input)}")
    order = torch.sort(input, dim=dim, descending=largest, stable=True).indices
    order = order[(*[slice(None)] * dim, slice(0, k))]
    values = torch.gather(input, dim, order)
    return torch.return_types.topk((values, order))
