"""Operands of ops on a ``PaddedTensor``: another one with the same rows, or a dense tensor that broadcasts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.op_schemas.aliasing import bump_versions
from subclasses.ragged.base import is_ragged, name_of, shown
from subclasses.ragged.jagged.operands import check_lengths_match
from subclasses.ragged.padded.buckets import widen

if TYPE_CHECKING:
    from subclasses.ragged.padded.tensor import PaddedTensor

# ---- which rows match ------------------------------------------------------------------------------------------


def leader(x: PaddedTensor, values: Sequence[Any]) -> PaddedTensor:
    """Returns the first padded tensor that is not merged; a merged operand may have an entry for each row."""
    return next((v for v in values if isinstance(v, x.ragged_class) and not v.merged), x)


def check_rows_match(func: Any, x: PaddedTensor, y: PaddedTensor) -> None:
    """Raises unless the rows of two tensors have the same lengths; asynchronous on a GPU."""
    if x.lengths is not y.lengths or torch.compiler.is_dynamo_compiling():
        check_lengths_match(func, x.lengths, y.lengths)


def check_fits(func: Any, x: PaddedTensor, y: Any) -> None:
    """Raises unless ``y`` has the rows of ``x``, or is a dense tensor that broadcasts against ``x``."""
    if isinstance(y, x.ragged_class):
        if (y.dim(), y.ragged_dim, y.batch_dim) != (x.dim(), x.ragged_dim, x.batch_dim):
            raise DispatchError(
                f"{name_of(func)}: padded tensors combine when they have as many dimensions and their rows at the same "
                f"ones, got {shown(x)} and {shown(y)}",
                code="rows-apart",
                hint="add dimensions by unsqueeze, or swap them by transpose",
            )
        if 1 in (x.lengths.shape[0], y.lengths.shape[0]) and x.lengths.shape != y.lengths.shape:
            raise DispatchError(
                f"{name_of(func)}: a single row is not repeated: {shown(x)} and {shown(y)}",
                code="rows-apart",
                hint="a table is, with 0 where it has no entry: write y.to_dense() for the table of a single "
                f"row{_widened(x, y)}",
            )
        check_rows_match(func, x, y)
        return
    missing = x.rank - y.dim()
    if missing < 0 or hasattr(type(y), "__spec__"):
        raise DispatchError(
            f"{name_of(func)}: {shown(y)} beside {shown(x)}",
            code="rows-apart",
            hint="expected a dense tensor that broadcasts against it",
        )
    for dim in (x.ragged_dim, x.batch_dim):
        if dim >= missing and y.size(dim - missing) != 1 and y.size(dim - missing) != x.size(dim):
            raise ValueError(f"{name_of(func)}: {shown(y)} does not broadcast against {shown(x)}")


def _widened(x: PaddedTensor, y: PaddedTensor) -> str:
    """Returns a hint for errors: how to give two tables the same width."""
    return "" if x.width == y.width else f", after x.to_padded(at_least={max(x.width, y.width)}) for both"


def as_wide(x: PaddedTensor, y: PaddedTensor) -> PaddedTensor:
    """Returns ``y``, which has the rows of ``x``, in a table of the width of ``x``; differentiable."""
    if y.width == x.width:
        return y
    if y.merged:
        return as_wide(x.unmerged(), y.unmerged()).merge()
    return y.with_padded(widen(y.unwrap("padded"), y.ragged_dim, x.width))


def _has_entry_per_row(x: PaddedTensor, y: Any) -> bool:
    """Returns whether ``y`` has an entry for each row of ``x``, as a reduction of a padded batch returns."""
    return (
        isinstance(y, x.ragged_class)
        and y.merged
        and x.row_count is not None
        and (y.dim(), y.ragged_dim, y.size(y.ragged_dim)) == (x.dim(), x.batch_dim, x.size(x.batch_dim))
        and not x.merged
    )


# ---- the interface ---------------------------------------------------------------------------------------------


def beside(x: PaddedTensor, op: Any, other: Any) -> Tensor:
    """Returns an operand that broadcasts against the table; below autograd."""
    check_fits(op, x, other)
    return as_wide(x, other)._raw_padded if isinstance(other, x.ragged_class) else other


def aligned(x: PaddedTensor, func: Any, other: Any) -> Tensor:
    """Converts an operand so that its cotangent has its own class; above autograd.

    A dense operand with a value for each entry would get a ragged cotangent, since autograd sums no dimension. So it
    becomes a ragged operand with the rows of ``x``. An operand that broadcasts gets a sum over existing entries.
    """
    if _has_entry_per_row(x, other):
        return other.to_dense()
    check_fits(func, x, other)
    if isinstance(other, x.ragged_class):
        return as_wide(x, other)
    missing = x.rank - other.dim()
    if not other.requires_grad or min(x.ragged_dim, x.batch_dim) < missing:
        return other
    if any(other.size(d - missing) != x.size(d) for d in (x.ragged_dim, x.batch_dim)):
        return other
    return x.like_dense(other[(None,) * missing])


def operand(x: PaddedTensor, func: Any, other: Any) -> Any:
    """Returns an operand as a plain tensor that broadcasts against the table, with 1 in the padding; above autograd.

    Ones are in the domain of every loss: no derivative in the padding is NaN, and the padding receives no cotangent.
    """
    if not isinstance(other, Tensor):
        return other
    other = other if other is x else aligned(x, func, other)
    return other.to_dense(1) if is_ragged(other) else other


def alongside(x: PaddedTensor, func: Any, other: PaddedTensor) -> PaddedTensor:
    """Returns ``other``, which has the rows of ``x``, in a table of the same width; other dimensions may differ."""
    check_rows_match(func, x, other)
    return as_wide(x, other)


def relaid(x: PaddedTensor, func: Any, other: PaddedTensor) -> PaddedTensor:
    """Returns ``other``, which has the dimensions of ``x``, with the lengths tensor of ``x``; differentiable."""
    wide = alongside(x, func, other)
    return wide if wide.lengths is x.lengths else x.with_padded(wide.unwrap("padded"))


def moved(x: PaddedTensor, stored: Tensor) -> PaddedTensor:
    """Returns another table on another device, with the rows moved there."""
    row_count = None if x.row_count is None else x.row_count.to(stored.device)
    return x.with_lengths(stored, x.lengths.to(stored.device), row_count)


def write(x: PaddedTensor, op: Any, new: Tensor, non_blocking: bool) -> None:
    """Writes a whole table; values in the padding do not exist."""
    x._raw_padded.copy_(new, non_blocking)
    bump_versions([x._raw_padded])


# ---- factors of a product --------------------------------------------------------------------------------------


def check_factors(x: PaddedTensor, func: Any, a: Any, b: Any) -> None:
    """Raises unless two factors have as many dimensions, or one is a matrix, with the batch before the last two."""
    n = max(a.dim(), b.dim())
    for t in (a, b):
        padded = isinstance(t, x.ragged_class)
        matrix = t.dim() == 2 and not padded
        if (t.dim() != n and not matrix) or (padded and t.batch_dim >= n - 2 and not t.merged):
            raise DispatchError(
                f"{func.__name__}: {shown(a)} and {shown(b)}",
                code="rows-apart",
                hint="expected as many dimensions, or a matrix, and the batch dimension before the last two",
            )


def check_same_rows(x: PaddedTensor, func: Any, a: PaddedTensor, b: PaddedTensor) -> None:
    """Raises unless two factors have the same rows, in tables of the same width."""
    moved = a.batch_dim != b.batch_dim and not (a.merged and b.merged)
    if moved:
        raise DispatchError(
            f"{func.__name__}: {shown(a)} and {shown(b)} have their rows at other places",
            code="rows-apart",
            hint="use transpose",
        )
    if a.width != b.width:
        raise DispatchError(
            f"{func.__name__}: expected tables of one width, got {a.width} for {shown(a)} and {b.width} for {shown(b)}",
            code="rows-apart",
            hint=f"use x.to_padded(at_least={max(a.width, b.width)})",
        )
    check_rows_match(func, a, b)
