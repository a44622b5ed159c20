"""Writing into a ``PaddedTensor`` by an index.

A write computes a new table with the written entries, and copies it over the old one as an in-place op does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.base import shown
from subclasses.ragged.indexing.index import (
    doing,
    expanded,
    is_all,
    is_index,
    is_int,
    outer_positions,
    replaced,
    shown_index,
)
from subclasses.ragged.padded import checks
from subclasses.ragged.padded.operands import as_wide, check_rows_match
from subclasses.ragged.padded.selection import (
    beside_table,
    check_mask,
    checked_positions,
    settled_pairs,
    take_rows,
)

if TYPE_CHECKING:
    from subclasses.ragged.padded.tensor import PaddedTensor

# ---- the interface ---------------------------------------------------------------------------------------------


def with_written(x: PaddedTensor, func: Any, index: Any, value: Any) -> PaddedTensor:
    """Returns ``x`` with a value at an index; padding that is written as well receives no cotangent."""
    by_mask = isinstance(index, x.ragged_class)
    return x.like_dense(_by_mask(func, x, index, value) if by_mask else _by_index(x, index, value))


def with_put(
    x: PaddedTensor, func: Any, indices: Sequence[Any], values: Any, accumulate: bool
) -> PaddedTensor:
    """Returns ``x`` with values at index tensors."""
    if isinstance(values, x.ragged_class):
        raise DispatchError(
            f"{func.__name__}: expected dense values for a padded tensor, got {shown(values)} for {shown(x)}",
            code="write-misfit",
            hint="write x[index] = values",
        )
    index = _existing(x, tuple(indices), values)
    table = x.unwrap("padded")
    if any(isinstance(i, slice) and not is_all(i) for i in index):  # the positions of one row
        written = table.clone()
        written[index] = written[index] + values if accumulate else values
        return x.like_dense(written)
    trimmed = index[: 1 + max((p for p, i in enumerate(index) if not is_all(i)), default=-1)]
    return x.like_dense(table.index_put(trimmed, values, accumulate))


# ---- by index --------------------------------------------------------------------------------------------------


def _by_mask(func: Any, x: Any, mask: Any, value: Any) -> Tensor:
    if isinstance(value, x.ragged_class) and mask.dim() == 2 and (x.batch_dim, x.ragged_dim) == (0, 1):
        check_mask(func, x, mask)
        return _put_back(x, as_wide(x, mask), value)
    raise DispatchError(
        f"{doing(func)} {shown(x)}: expected a number, or the result of x[mask] for a mask [B, T], got {shown(value)}",
        code="argument-refused",
    )


def _by_index(x: PaddedTensor, index: Any, value: Any) -> Tensor:
    index = expanded(x, index)
    if isinstance(value, x.ragged_class):
        value = _table_of(x, index, value)
    if not x.merged and _crosses(x, index):
        return _by_numbers(x, index, value)
    index = _existing(x, index, value)
    table = x.unwrap("padded").clone()
    table[index] = value
    return table


def _crosses(x: PaddedTensor, index: tuple[Any, ...]) -> bool:
    """Returns whether an index selects features of several rows, where index tensors would broadcast together."""
    positions = outer_positions(index)
    features = any(is_index(index[p]) for d, p in enumerate(positions) if d not in x.row_dims)
    return features and not is_index(index[positions[x.ragged_dim]])


def _by_numbers(x: PaddedTensor, index: tuple[Any, ...], value: Any) -> Tensor:
    """Returns the table with the elements replaced whose numbers the index selects."""
    table = x.unwrap("padded")
    numbers = torch.arange(table.numel(), device=table.device).view(table.shape)
    with torch.no_grad():
        elements: Any = x.with_padded(numbers)[index]
    elements = elements.to_dense(table.numel()) if isinstance(elements, x.ragged_class) else elements
    new = torch.as_tensor(value, dtype=table.dtype, device=table.device).expand(elements.shape)
    # Values for padding are written past the last element, which is cut off.
    flat = torch.cat([table.flatten(), table.new_zeros(1)]).index_put((elements.flatten(),), new.flatten())
    return flat[:-1].view(table.shape)


def _existing(x: PaddedTensor, index: Any, value: Any) -> tuple[Any, ...]:
    """Returns an expanded index of the table that writes to existing entries only."""
    index = expanded(x, index)
    positions = outer_positions(index)
    at_batch, at_ragged = positions[x.batch_dim], positions[x.ragged_dim]
    if x.merged and not is_all(index[at_batch]):
        raise DispatchError(
            f"writing into {shown(x)}: merged dimensions stay whole", code="row-dims", hint=checks.UNMERGE
        )
    rows, entries = index[at_batch], index[at_ragged]
    if is_int(rows) and is_all(entries) and isinstance(value, Tensor) and not any(map(is_index, index)):
        index = replaced(index, at_ragged, _positions_of_row(x, rows, index[at_ragged + 1 :], value))
    elif not x.merged:
        index = _settled(x, index, (at_batch, rows), (at_ragged, entries))
    return index


def _positions_of_row(x: PaddedTensor, row: Any, after: tuple[Any, ...], value: Tensor) -> slice:
    """Returns the positions to write a row to: its own for a value of its length, else the whole width of the table.

    Args:
        x: the tensor.
        row: the number of the row.
        after: the index of the dimensions after the ragged one.
        value: the value to write.

    Raises:
        ValueError: the value has another length.
    """
    from_end = 1 + sum(isinstance(i, slice) for i in after)
    n, width = value.shape[-from_end] if value.dim() >= from_end else 1, x.width
    if n in (1, width):
        return slice(None)
    length = x.lengths[row].item()
    if n != length:
        raise ValueError(
            f"x[{row}] = value of {shown(x)}: expected the {length} entries of the row, or the {width} places of the "
            f"table, got {n}"
        )
    return slice(0, n)


def _table_of(x: PaddedTensor, index: tuple[Any, ...], value: PaddedTensor) -> Tensor:
    """Returns the table of the value for ``x[index]``; raises unless both have the same lengths of rows."""
    part = x[index]
    if not isinstance(part, x.ragged_class):
        raise DispatchError(
            f"writing into {shown(x)}: expected a dense value for {shown_index(index)}, got {shown(value)}",
            code="write-misfit",
        )
    check_rows_match("x[index] = value", part, value)
    return as_wide(part, value).to_dense()


def _settled(x: PaddedTensor, index: Any, at_rows: Any, at_entries: Any) -> Any:
    """Returns an index of the table; asserts that the entries exist."""
    (at_batch, rows), (at_ragged, entries) = at_rows, at_entries
    if is_index(entries) and (is_index(rows) or is_int(rows)):
        return _paired(x, index, at_batch, at_ragged)
    if isinstance(entries, slice):
        if any(bound is not None and bound < 0 for bound in (entries.start, entries.stop)):
            raise DispatchError(
                f"writing into {shown(x)}: bounds that count from each row's end are read only",
                code="argument-refused",
                hint="use a mask",
            )
        return index
    if not is_int(entries):
        raise DispatchError(
            f"writing into {shown(x)}: index tensors for places need index tensors for rows",
            code="argument-refused",
        )
    if not isinstance(rows, slice):
        return _paired(x, index, at_batch, at_ragged)
    reached = x if is_all(rows) else take_rows(x, rows)
    positions = checked_positions(reached, torch.full_like(reached.lengths, entries).unsqueeze(1)).squeeze(1)
    if at_ragged != at_batch + 1:
        r, b = x.ragged_dim, x.batch_dim
        other = f"transpose({r}, {b})" if r + 1 == b else f"movedim({r}, {b if r < b else b + 1})"
        raise DispatchError(
            f"writing into {shown(x)}: one place of every row needs the batch dimension just before it",
            code="row-dims",
            hint=f"write to x.{other}",
        )
    numbers = torch.arange(x.lengths.shape[0], device=x.lengths.device)[rows]
    # Rows beyond the batch write to their padding.
    return replaced(replaced(index, at_batch, numbers), at_ragged, positions.clamp(min=0))


def _paired(x: PaddedTensor, index: Any, at_batch: int, at_ragged: int) -> Any:
    """Returns an index with index tensors for rows and positions; a single pair keeps a dimension, which broadcasts."""
    rows, entries = settled_pairs(x, index[at_batch], index[at_ragged])
    if rows.dim() == 0:  # a zero-dimensional index would be read on the host
        rows, entries = rows.unsqueeze(0), entries.unsqueeze(0)
    return replaced(replaced(index, at_batch, rows), at_ragged, entries)


def _put_back(x: PaddedTensor, mask: PaddedTensor, values: PaddedTensor) -> Tensor:
    """Returns the table of ``x`` with the entries replaced that a mask selects, in order; the inverse of `pick`."""
    picked = mask.to_dense(False)
    rank = (picked.cumsum(1) - 1).clamp(min=0)
    check_rows_match(
        torch.Tensor.__setitem__, values, x.with_lengths(x._raw_padded, picked.sum(1), x.row_count)
    )
    source = as_wide(x, values).to_dense().expand(x.shape)
    return torch.where(
        beside_table(x, picked), source.gather(1, beside_table(x, rank).expand(x.shape)), x.to_dense()
    )
