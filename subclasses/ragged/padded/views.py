"""Views: the same view of the table, with an eye on where the rows are afterwards.

Dimensions of the entries are swapped, split, joined and cut; the batch and the ragged dimension may be moved and
merged, and stay whole. Below autograd, so that a view is one to autograd too; what cuts rows stands in indexing.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from subclasses.errors import DispatchError
from subclasses.ragged.padded.cutting import count_after, lengths_after
from subclasses.ragged.padded.merging import places_after
from subclasses.ragged.padded.rows import outer_dims, rows_stay, shown, without
from subclasses.ragged.padded.tensor import PaddedTensor

aten = torch.ops.aten

_ELSE = "x.to_dense(), x.to_tensors() and x.to_jagged() give tensors without this limit"


def entry_dim(func: Any, x: PaddedTensor, dim: int) -> int:
    """A dimension of the entries, counted from the front.

    Raises:
        DispatchError: rows are along it.
    """
    (dim,) = outer_dims(func, x, dim)
    if not rows_stay(x, [dim]):
        raise DispatchError(f"{func}: {shown(x)} stays whole along its rows, got dimension {dim}; {_ELSE}")
    return dim


# ---- dimensions ------------------------------------------------------------------------------------------------


@PaddedTensor.implements(aten.transpose.int)
def _(op: Any, x: PaddedTensor, a: int, b: int) -> Any:
    (a,), (b,) = outer_dims(op, x, a), outer_dims(op, x, b)
    swapped = {a: b, b: a}
    return x.with_padded(x.padded.transpose(a, b), *(swapped.get(d, d) for d in (x.ragged_dim, x.batch_dim)))


@PaddedTensor.implements(aten.t.default)
def _(op: Any, x: PaddedTensor) -> Any:
    return x.with_padded(x.padded.t(), 1 - x.ragged_dim, 1 - x.batch_dim)


@PaddedTensor.implements(aten.permute.default)
def _(op: Any, x: PaddedTensor, dims: Sequence[int]) -> Any:
    dims = outer_dims(op, x, dims)
    return x.with_padded(x.padded.permute(dims), dims.index(x.ragged_dim), dims.index(x.batch_dim))


@PaddedTensor.implements(aten.unsqueeze.default)
def _(op: Any, x: PaddedTensor, dim: int) -> Any:
    padded = x.padded.unsqueeze(dim)  # which says if there is no such dimension
    place = dim % padded.dim()
    return x.with_padded(padded, *(d + (d >= place) for d in (x.ragged_dim, x.batch_dim)))


@PaddedTensor.implements(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _(op: Any, x: PaddedTensor, dims: int | Sequence[int] | None = None) -> Any:
    """Dimensions of the entries only: rows keep theirs, whatever the extent."""
    found = [d for d in outer_dims(op, x, dims) if x.padded.size(d) == 1 and rows_stay(x, [d])]
    return without(x, x.padded.squeeze(found), found)


@PaddedTensor.implements(aten.expand.default)
def _(op: Any, x: PaddedTensor, size: Sequence[int], *, implicit: bool = False) -> Any:
    new = len(size) - x.dim()
    for d in (x.ragged_dim, x.batch_dim):
        if new < 0 or (size[d + new] != -1 and size[d + new] != x.size(d)):
            raise DispatchError(f"{op}: {shown(x)} cannot expand along its rows, got the size {list(size)}")
    return x.with_padded(x.padded.expand(size), x.ragged_dim + new, x.batch_dim + new)


# ---- sizes -----------------------------------------------------------------------------------------------------


@PaddedTensor.implements(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)
def _(op: Any, x: PaddedTensor, size: Sequence[int], stride: Any = None) -> Any:
    size = list(size)
    if -1 in size:
        unknown = size.index(-1)
        rest = math.prod(size[:unknown] + size[unknown + 1 :])
        size[unknown] = x.numel() // rest if rest else 0
    places = places_after(op, x, size)
    # A view for `view`; elsewhere PyTorch has made sure that one is possible, or that none is expected.
    padded = x.padded.view(size) if op is aten.view.default else x.padded.reshape(size)
    return x.with_padded(padded, *places)


# ---- cutting ---------------------------------------------------------------------------------------------------


@PaddedTensor.implements(aten.select.int)
def _(op: Any, x: PaddedTensor, dim: int, index: int) -> Any:
    dim = entry_dim(op, x, dim)
    return without(x, x.padded.select(dim, index), [dim])


@PaddedTensor.implements(aten.slice.Tensor)
def _(op: Any, x: PaddedTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """Of features, of rows, or the same places of every row; see cutting.py for bounds from each row's end."""
    (dim,) = outer_dims(op, x, dim)
    table = op(x.padded, dim, start, end, step)
    if rows_stay(x, [dim]) or (start in (None, 0) and step == 1 and _reaches_end(x.size(dim), end)):
        return x.with_padded(table)
    if dim == x.batch_dim and not x.merged:
        return x.with_lengths(table, op(x.lengths, 0, start, end, step), count_after(op, x, start, end, step))
    entry = entry_dim if x.merged or (start is not None and start < 0) else None
    return (
        entry(op, x, dim) if entry else x.with_lengths(table, lengths_after(x, start, end, step), x.row_count)
    )


def _reaches_end(size: Any, end: Any) -> bool:
    return end is None or end is size or (isinstance(end, int) and end >= size)


@PaddedTensor.implements(aten.split.Tensor, aten.split_with_sizes.default)
def _(op: Any, x: PaddedTensor, size: Any, dim: int = 0) -> Any:
    return [x.with_padded(part) for part in op(x.padded, size, entry_dim(op, x, dim))]


@PaddedTensor.implements(aten.unbind.int)
def _(op: Any, x: PaddedTensor, dim: int = 0) -> Any:
    dim = entry_dim(op, x, dim)
    return [without(x, part, [dim]) for part in op(x.padded, dim)]


# ---- and their derivatives -------------------------------------------------------------------------------------


@PaddedTensor.implements(aten.slice_backward.default)
def _(op: Any, grad: PaddedTensor, size: Sequence[int], dim: int, *cut: Any) -> Any:
    """Of a slice of rows, a plain cotangent, zero where there is no entry: other rows may have been longer."""
    if rows_stay(grad, outer_dims(op, grad, dim)):
        return grad.with_padded(op(grad.padded, size, dim, *cut))
    return op(grad.kept(grad.padded), size, dim, *cut)


@PaddedTensor.implements(aten.select_backward.default)
def _(op: Any, grad: PaddedTensor, size: Sequence[int], dim: int, index: int) -> Any:
    dim = dim % len(size)
    places = (d + (d >= dim) for d in (grad.ragged_dim, grad.batch_dim))
    return grad.with_padded(op(grad.padded, size, dim, index), *places)
