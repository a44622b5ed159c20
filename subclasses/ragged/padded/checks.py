"""Checks of the parts of a padded tensor; each error has the given value and a remedy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError, one_of
from subclasses.ragged.checks import is_traced
from subclasses.spec.load_checks import check_unwrapped, has_data

UNMERGE = "unmerge them by x.unflatten(0, (B, T))"
UNPAD_BATCH = "x.to_jagged(), or a batch that is not padded, has no such limit"

# ---- shapes ----------------------------------------------------------------------------------------------------


def check_parts(
    padded: Any, lengths: Any, ragged_dim: Any, batch_dim: Any, row_count: Any = None
) -> tuple[int, int]:
    """Returns both dimensions counted from the front; raises if the parts do not match.

    The constructor checks types and dtypes later.
    """
    if not isinstance(padded, Tensor) or not isinstance(lengths, Tensor):
        return ragged_dim, batch_dim  # the constructor raises, and names the field
    n = padded.dim()
    for name, dim in (("ragged_dim", ragged_dim), ("batch_dim", batch_dim)):
        if type(dim) is not int or not -n <= dim < n:
            raise ValueError(
                f"PaddedTensor.{name}: expected a dimension of the table of shape {tuple(padded.shape)}, got {dim!r}"
            )
    ragged_dim, batch_dim = ragged_dim % n, batch_dim % n
    if ragged_dim == batch_dim:
        raise ValueError(
            f"PaddedTensor: ragged_dim and batch_dim are both {ragged_dim}; rows are numbered by another"
        )
    if lengths.dim() != 1 or lengths.shape[0] != padded.shape[batch_dim]:
        raise ValueError(
            f"PaddedTensor.lengths: expected shape [{padded.shape[batch_dim]}], one for each row of a table of shape "
            f"{tuple(padded.shape)} with batch_dim={batch_dim}, got {tuple(lengths.shape)}"
        )
    if isinstance(row_count, Tensor) and tuple(row_count.shape) != (1,):
        raise ValueError(
            f"PaddedTensor.row_count: expected shape [1], the number of rows in the batch, got {tuple(row_count.shape)}"
        )
    return ragged_dim, batch_dim


def check_plain(x: Any, dim: int) -> int:
    """Returns a dimension counted from the front; raises unless ``x`` is plain and has two or more dimensions."""
    if not isinstance(x, Tensor) or hasattr(type(x), "__spec__") or x.dim() < 2:
        shape = f" of shape {tuple(x.shape)}" if isinstance(x, Tensor) else ""
        raise ValueError(
            f"PaddedTensor.pad: expected a plain tensor of two dimensions or more, got {one_of(type(x))}{shape}"
        )
    if not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"PaddedTensor.pad: expected a dimension of a tensor of shape {tuple(x.shape)}, got {dim}"
        )
    return dim % x.dim()


def check_like(x: Any, dense: Tensor) -> None:
    """Raises unless a table has the rows and the width of a padded tensor."""
    size = x.stored.shape
    for dim in (x.batch_dim, x.ragged_dim):
        if dense.dim() <= dim or dense.shape[dim] != size[dim]:
            raise ValueError(
                f"PaddedTensor: expected a table with {size[x.batch_dim]} rows along {x.batch_dim} and the width "
                f"{size[x.ragged_dim]} along {x.ragged_dim}, got one of shape {tuple(dense.shape)}"
            )


def check_entries(x: Any, entries: Any) -> None:
    """Raises unless there is one entry for each row."""
    wanted = [n for d, n in enumerate(x.shape) if d != x.ragged_dim]
    if x.merged or not isinstance(entries, Tensor) or list(entries.shape) != wanted:
        description = tuple(entries.shape) if isinstance(entries, Tensor) else type(entries).__name__
        raise ValueError(
            f"PaddedTensor.append: expected one entry for each row, of shape {tuple(wanted)}, got {description}"
        )


# ---- data ------------------------------------------------------------------------------------------------------


def read_lengths(x: Any) -> list[int]:
    """Returns the lengths of the rows in the batch as ints; raises in a trace, or for a length that does not fit."""
    if is_traced(x.lengths):
        raise DispatchError(
            f"{type(x).__name__}: rows as plain tensors have sizes that a compiled function does not know",
            code="graph-refused",
            hint="slices, x[:, -1] and x[mask] give tensors of sizes that it does",
        )
    lengths, width = x.lengths.tolist(), x._raw_padded.shape[x.ragged_dim]
    if any(not 0 <= n <= width for n in lengths):
        raise ValueError(
            f"PaddedTensor.lengths: expected lengths from 0 to {width}, the extent of the table, got {lengths}"
        )
    return lengths if x.row_count is None else lengths[: int(x.row_count)]


def count_rows(x: Any) -> int:
    """Returns how many rows are in the batch; reads and checks their lengths, except in a trace."""
    if is_traced(x.lengths) and x.row_count is None:
        return x.lengths.shape[0]
    return len(read_lengths(x))


# ---- files -----------------------------------------------------------------------------------------------------


def check_loaded(
    table: Tensor, lengths: Tensor, row_count: Tensor | None, ragged_dim: Any, batch_dim: Any
) -> None:
    """Raises unless the parts of a padded tensor describe rows of its table; a greater length counts as its width."""
    if type(ragged_dim) is int and type(batch_dim) is int and ragged_dim == batch_dim:
        check_merged(table, lengths, batch_dim)
    elif check_parts(table, lengths, ragged_dim, batch_dim, row_count) != (ragged_dim, batch_dim):
        raise ValueError(
            f"PaddedTensor.ragged_dim: expected dimensions counted from the front, got {ragged_dim}, and {batch_dim} "
            f"for batch_dim"
        )
    check_unwrapped("PaddedTensor", "lengths", lengths)
    if _is_readable(lengths) and lengths.numel() and (least := int(lengths.min())) < 0:
        raise ValueError(f"PaddedTensor.lengths: expected none below 0, got {least}")
    if row_count is None:
        return
    check_unwrapped("PaddedTensor", "row_count", row_count)
    if tuple(row_count.shape) != (1,):
        raise ValueError(f"PaddedTensor.row_count: expected shape [1], got {tuple(row_count.shape)}")
    if _is_readable(row_count) and not 0 <= (count := int(row_count)) <= lengths.shape[0]:
        raise ValueError(
            f"PaddedTensor.row_count: expected from 0 to {lengths.shape[0]}, the rows of the table, got {count}"
        )


def _is_readable(t: Tensor) -> bool:
    return t.dtype is torch.int64 and has_data(t)


def check_merged(table: Tensor, lengths: Tensor, dim: Any) -> None:
    """Raises unless the merged batch and ragged dimension divides evenly among the rows."""
    if type(dim) is not int or not 0 <= dim < table.dim():
        raise ValueError(
            f"PaddedTensor.batch_dim: expected a dimension of the table of shape {tuple(table.shape)}, got {dim!r}"
        )
    rows, extent = (lengths.shape[0] if lengths.dim() == 1 else -1), table.shape[dim]
    if rows < 0 or (extent % rows if rows else extent):
        raise ValueError(
            f"PaddedTensor.lengths: expected shape [B], of rows that divide the {extent} places along {dim}, "
            f"got {tuple(lengths.shape)}"
        )
