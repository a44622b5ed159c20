"""What is asked of the parts of a padded tensor, each with an error that says what came and what to do."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.checks import is_traced

UNMERGE = "unmerge them by x.unflatten(0, (B, T))"
UNPAD_BATCH = "x.to_jagged(), or a batch that is not padded, has no such limit"

# ---- shapes ----------------------------------------------------------------------------------------------------


def check_parts(
    padded: Any, lengths: Any, ragged_dim: Any, batch_dim: Any, row_count: Any = None
) -> tuple[int, int]:
    """The two dimensions counted from the front, if the parts fit together; types and dtypes come later."""
    if not isinstance(padded, Tensor) or not isinstance(lengths, Tensor):
        return ragged_dim, batch_dim  # refused by the constructor, which names the field
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
    """The dimension counted from the front, of a plain tensor that has rows besides."""
    if not isinstance(x, Tensor) or hasattr(type(x), "__spec__") or x.dim() < 2:
        shape = f" of shape {tuple(x.shape)}" if isinstance(x, Tensor) else ""
        raise ValueError(
            f"PaddedTensor.pad: expected a plain tensor of two dimensions or more, got a {type(x).__name__}{shape}"
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
        found = tuple(entries.shape) if isinstance(entries, Tensor) else type(entries).__name__
        raise ValueError(
            f"PaddedTensor.append: expected one entry for each row, of shape {tuple(wanted)}, got {found}"
        )


# ---- data ------------------------------------------------------------------------------------------------------


def read_lengths(x: Any) -> list[int]:
    """The lengths on the host of the rows in the batch, if they are lengths of rows of the table."""
    if is_traced(x.lengths):
        raise DispatchError(
            f"{type(x).__name__}: rows as plain tensors have sizes that a compiled function does not know; slices, "
            f"x[:, -1] and x[mask] give tensors of sizes that it does"
        )
    found, width = x.lengths.tolist(), x._raw_padded.shape[x.ragged_dim]
    if any(not 0 <= n <= width for n in found):
        raise ValueError(
            f"PaddedTensor.lengths: expected lengths from 0 to {width}, the extent of the table, got {found}"
        )
    return found if x.row_count is None else found[: int(x.row_count)]


def count_rows(x: Any) -> int:
    """How many rows are in the batch; their lengths are read on the way, except while a graph is made."""
    if is_traced(x.lengths) and x.row_count is None:
        return x.lengths.shape[0]
    return len(read_lengths(x))
