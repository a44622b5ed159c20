"""``cat`` and ``stack``: of features, of the entries of each row, of the rows one after the other.

No length is read: rows are joined where one ends, in a table that has room for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.padded import checks
from subclasses.ragged.padded.cutting import beside_table, other_rows, take_places
from subclasses.ragged.padded.rows import check_fits, first_padded, outer_dims, rows_stay, shown
from subclasses.ragged.padded.tensor import PaddedTensor, widen
from subclasses.ragged.padded.views import entry_dim

aten = torch.ops.aten

# ---- above autograd --------------------------------------------------------------------------------------------


@PaddedTensor.implements(torch.cat)
def _(func: Any, tensors: Sequence[Tensor], dim: int = 0, *, out: None = None) -> Any:
    _check_no_out(func, out)
    x = first_padded(tensors)
    (dim,) = outer_dims(func, x, dim)
    if rows_stay(x, [dim]):
        return PaddedTensor.unruled(func, _settled(func, x, tensors), dim)
    parts = [t if isinstance(t, PaddedTensor) else as_rows(func, x, t) for t in tensors]
    for part in parts:
        check_joins(func, x, part, dim)
    return reduce(join_entries, parts) if dim == x.ragged_dim else join_rows(parts)


@PaddedTensor.implements(torch.stack)
def _(func: Any, tensors: Sequence[Tensor], dim: int = 0, *, out: None = None) -> Any:
    _check_no_out(func, out)
    return PaddedTensor.unruled(func, _settled(func, first_padded(tensors), tensors), dim)


def _check_no_out(func: Any, out: Any) -> None:
    if out is not None:
        raise DispatchError(
            f"{func.__name__}: padded tensors are joined into a new one, and not into an out="
        )


def _settled(func: Any, x: PaddedTensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """A dense operand becomes a ragged one where autograd sees it: its cotangent comes back ragged."""
    name = func.__name__
    return [t if isinstance(t, PaddedTensor) else x.like_dense(_checked(name, x, t)) for t in tensors]


def _checked(func: Any, x: PaddedTensor, t: Tensor) -> Tensor:
    """An operand that has the rows of ``x``, in a table as wide."""
    check_fits(func, x, t)
    if t.dim() != x.dim() or any(t.shape[d] != x.shape[d] for d in (x.ragged_dim, x.batch_dim)):
        raise DispatchError(
            f"{func}: expected tables of the same rows and width as {shown(x)}, got {shown(t)}"
        )
    return t


# ---- rows ------------------------------------------------------------------------------------------------------


def as_rows(func: Any, x: PaddedTensor, dense: Tensor) -> PaddedTensor:
    """A dense tensor as rows all of its width, beside those of ``x``; rows that the batch has not stay empty."""
    if dense.dim() != x.dim() or x.merged:
        raise DispatchError(
            f"{func.__name__}: expected as many dimensions as {shown(x)} has, got {shown(dense)}"
        )
    lengths = x.lengths.new_full((dense.shape[x.batch_dim],), dense.shape[x.ragged_dim])
    if x.row_count is not None:
        lengths = lengths * (torch.arange(lengths.shape[0], device=lengths.device) < x.row_count)
    y = x.with_lengths(dense, lengths, x.row_count)
    return y.with_padded(y.kept(dense))


def check_joins(func: Any, x: PaddedTensor, y: PaddedTensor, dim: int) -> None:
    """Raises unless entries or rows of ``y`` may follow those of ``x``."""
    free = (x.ragged_dim,) if dim == x.ragged_dim else (x.ragged_dim, x.batch_dim)
    alike = (x.dim(), x.ragged_dim, x.batch_dim) == (y.dim(), y.ragged_dim, y.batch_dim) and not x.merged
    if not alike or any(
        m != n for d, (m, n) in enumerate(zip(x.shape, y.shape, strict=True)) if d not in free
    ):
        raise DispatchError(f"{func.__name__}: {shown(x)} and {shown(y)} do not join along dimension {dim}")
    if dim == x.batch_dim and (x.row_count, y.row_count) != (None, None):
        raise DispatchError(f"{func.__name__}: rows do not follow a padded batch; {checks.UNPAD_BATCH}")


def join_entries(x: PaddedTensor, y: PaddedTensor) -> PaddedTensor:
    """Each row of ``x`` with the entries of that of ``y`` after its own."""
    places = torch.arange(x.width + y.width, device=x.lengths.device)
    behind = places - x.counts.unsqueeze(1)
    first = widen(x.to_dense(), x.ragged_dim, x.width + y.width)
    table = torch.where(beside_table(x, behind < 0), first, take_places(y, behind))
    return other_rows(x, table, x.counts + y.counts)


def join_rows(parts: Sequence[PaddedTensor]) -> PaddedTensor:
    """The rows of all, in a table as wide as the widest."""
    x, width = parts[0], max(part.width for part in parts)
    tables = [widen(part.unwrap("padded"), x.ragged_dim, width) for part in parts]
    return x.with_lengths(torch.cat(tables, x.batch_dim), torch.cat([part.lengths for part in parts]))


# ---- below autograd --------------------------------------------------------------------------------------------


@PaddedTensor.implements(aten.cat.default)
def _(op: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    x = first_padded(tensors)
    return x.with_padded(op(_tables(op, x, tensors), entry_dim(op, x, dim)))


@PaddedTensor.implements(aten.stack.default)
def _(op: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    x = first_padded(tensors)
    padded = op(_tables(op, x, tensors), dim)
    place = dim % padded.dim()
    return x.with_padded(padded, *(d + (d >= place) for d in (x.ragged_dim, x.batch_dim)))


def _tables(op: Any, x: PaddedTensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tables of the operands; a dense one is a derivative that is zero."""
    return [t.padded if isinstance(t, PaddedTensor) else t for t in (_checked(op, x, t) for t in tensors)]
