"""Joining of ``JaggedTensor`` s: the rows of several, or the entries of each row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.base import shown
from subclasses.ragged.checks import check_all_exist
from subclasses.ragged.jagged.operands import check_counts_match

if TYPE_CHECKING:
    from subclasses.ragged.jagged import JaggedTensor


def as_rows(x: JaggedTensor, func: Any, dense: Tensor) -> JaggedTensor:
    """Returns a dense tensor as rows of equal length, ragged along the dimension of ``x``."""
    if hasattr(type(dense), "__spec__") or dense.dim() != x.dim():
        raise DispatchError(
            f"{func.__name__}: {shown(x)} and {shown(dense)} do not join",
            code="rows-apart",
            hint="expected ragged tensors, or dense ones of as many dimensions",
        )
    rows, width = dense.shape[0], dense.shape[x.ragged_dim]
    starts = torch.arange(rows + 1, device=x.offsets.device) * width
    entries = dense.movedim(x.ragged_dim, 1).flatten(0, 1)
    count = x.count if x.count is not None and rows == x.shape[0] else None
    return type(x)(x.trailing(entries), starts, count=count, ragged_dim=x.ragged_dim, max_length=width)


def join_rows(x: JaggedTensor, func: Any, parts: Sequence[JaggedTensor]) -> JaggedTensor:
    """Joins the rows of all ``parts``, one after the other."""
    for t in parts:
        check_all_exist(t, func.__name__)
    values_dim = x.ragged_dim - 1
    ends = list(accumulate((t._raw_values.shape[values_dim] for t in parts), initial=0))
    offsets = [t.offsets[:-1] + end for t, end in zip(parts, ends, strict=False)]
    offsets = torch.cat([*offsets, parts[-1].offsets[-1:] + ends[-2]])
    holes = any(t.lengths is not None for t in parts)
    return type(x)(
        torch.cat([t.unwrap("values") for t in parts], values_dim),
        offsets,
        lengths=torch.cat([t.counts for t in parts]) if holes else None,
        ragged_dim=x.ragged_dim,
        max_length=reduce(torch.sym_max, [t.max_length for t in parts]),  # type: ignore[arg-type]
    )


def join_entries(x: JaggedTensor, parts: Sequence[JaggedTensor]) -> JaggedTensor:
    """Joins the entries of each row of all ``parts``, in their order; spare rows have zeros."""
    for t in parts:
        check_counts_match("cat", x, t)
    rows = [t.segments for t in parts]
    reaches = [r.offsets.diff() if r.lengths is None else r.row_lengths for r in rows]
    lengths = reduce(torch.add, reaches)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    total = sum(r.total for r in rows)
    like, first = x.leading(x.unwrap("values")), offsets[:-1]
    table = like.new_zeros(total + 1, *like.shape[1:])
    for t, r, reach in zip(parts, rows, reaches, strict=True):
        entries = t.leading(t.unwrap("values"))
        # Holes are written past the last entry, which is cut off.
        where = first.index_select(0, r.rows.clamp(max=max(r.count - 1, 0))) + r.positions
        where = where if r.exists is None else torch.where(r.exists, where, total)
        table, first = table.index_copy(0, where, entries), first + reach
    holes = any(t.lengths is not None for t in parts)
    values_dim = x.ragged_dim - 1
    return type(x)(
        table[:-1].movedim(0, values_dim),
        offsets,
        lengths=lengths if holes else None,
        count=x.count,
        ragged_dim=x.ragged_dim,
        max_length=sum(t.max_length for t in parts),
    )
