"""Joining of ``PaddedTensor`` s: the rows of several, or the entries of each row.

No length is read on the host: entries are joined at the end of each row, in a table as wide as both.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.base import shown
from subclasses.ragged.padded import checks
from subclasses.ragged.padded.buckets import widen
from subclasses.ragged.padded.selection import beside_table, entries_at, other_rows

if TYPE_CHECKING:
    from subclasses.ragged.padded.tensor import PaddedTensor


def as_rows(x: PaddedTensor, func: Any, dense: Tensor) -> PaddedTensor:
    """Returns a dense tensor as rows of its width, with the dimensions of ``x``; rows beyond the batch stay empty."""
    if dense.dim() != x.dim() or x.merged:
        raise DispatchError(
            f"{func.__name__}: expected as many dimensions as {shown(x)} has, got {shown(dense)}",
            code="rows-apart",
        )
    lengths = x.lengths.new_full((dense.shape[x.batch_dim],), dense.shape[x.ragged_dim])
    if x.row_count is not None:
        lengths = lengths * (torch.arange(lengths.shape[0], device=lengths.device) < x.row_count)
    return other_rows(x, dense, lengths)


def join_entries(x: PaddedTensor, parts: Sequence[PaddedTensor]) -> PaddedTensor:
    """Joins the entries of each row of all parts, in their order."""
    return reduce(_append_entries, parts)


def _append_entries(x: PaddedTensor, y: PaddedTensor) -> PaddedTensor:
    """Appends the entries of each row of ``y`` to the same row of ``x``."""
    positions = torch.arange(x.width + y.width, device=x.lengths.device)
    behind = positions - x.counts.unsqueeze(1)
    first = widen(x.to_dense(), x.ragged_dim, x.width + y.width)
    table = torch.where(beside_table(x, behind < 0), first, entries_at(y, behind))
    return other_rows(x, table, x.counts + y.counts)


def join_rows(x: PaddedTensor, func: Any, parts: Sequence[PaddedTensor]) -> PaddedTensor:
    """Joins the rows of all parts, in a table as wide as the widest."""
    for number, part in enumerate(parts):
        if part.row_count is not None:
            raise DispatchError(
                f"{func.__name__}: expected batches that are not padded, got tensors[{number}] with a row_count, "
                f"{shown(part)}",
                code="batch-padded",
                hint=checks.UNPAD_BATCH,
            )
    width = max(part.width for part in parts)
    tables = [widen(part.unwrap("padded"), x.ragged_dim, width) for part in parts]
    return x.with_lengths(torch.cat(tables, x.batch_dim), torch.cat([part.lengths for part in parts]), None)
