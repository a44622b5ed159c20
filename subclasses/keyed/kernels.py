"""Lookups in the tables of several keys, as one op each.

Where the rows of a key begin and end in the values is data, so outside of a graph each key's part is cut out and goes
to PyTorch's own kernel. In a graph a cut would be a size that depends on data; there one op looks up all keys, reads
the ends inside, and has results whose sizes are known: no graph is made for other lengths, none read waits outside.

An op's backward gives dense gradients, and another one sparse gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten
SUM, MEAN, MAX = MODES = (0, 1, 2)

# ---- the part of a key -----------------------------------------------------------------------------------------


class Part(NamedTuple):
    """The entries of a key: where they are in the values (a range, or an index of each), and where each row begins."""

    place: slice | Tensor
    starts: Tensor

    def take(self, t: Tensor) -> Tensor:
        """The part of what there is for each entry; differentiable."""
        return t[self.place] if isinstance(self.place, slice) else t.index_select(0, self.place)

    def ids(self, values: Tensor) -> Tensor:
        """The part of the ids, in the dtype of where rows begin: PyTorch's kernels want one for both."""
        return self.take(values).to(self.starts.dtype)


def parts_of(offsets: Tensor, lengths: Tensor | None) -> list[Part]:
    """The parts of all keys; reads the offsets.

    Args:
        offsets: ``[K, B + 1]``, where each row begins, and where the last one ends.
        lengths: ``[K, B]``, for rows with gaps between them.
    """
    if lengths is not None and not lengths.equal(offsets.diff(dim=1)):
        return [_scattered(*rows) for rows in zip(offsets, lengths, strict=True)]
    ends = offsets[:, [0, -1]].tolist()
    return [
        Part(slice(first, last), row[:-1] - first) for row, (first, last) in zip(offsets, ends, strict=True)
    ]


def _scattered(offsets: Tensor, lengths: Tensor) -> Part:
    starts = lengths.cumsum(0) - lengths
    shift = torch.repeat_interleave(offsets[:-1] - starts, lengths)
    return Part(shift + torch.arange(shift.shape[0], device=shift.device), starts)


# ---- pooled ----------------------------------------------------------------------------------------------------


@torch.library.custom_op("subclasses::keyed_pool", mutates_args=())
def keyed_pool(  # noqa: PLR0913
    tables: list[Tensor],
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    weights: Tensor | None,
    modes: list[int],
    paddings: list[int],
    by_frequency: list[bool],
    sparse: bool,
    firsts: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of each key, looked up in its table and pooled.

    Args:
        tables: ``[V, D]`` for each key.
        values: ``[total]``, ids.
        offsets: ``[K, B + 1]``, where each row begins.
        lengths: ``[K, B]``, for rows with gaps between them.
        weights: ``[total]``, factors of what is looked up.
        modes: 0 for the sum, 1 for the mean, 2 for the largest of each column.
        paddings: ids that count as absent, -1 for none.
        by_frequency: whether gradients are divided by how often an id occurs.
        sparse: whether the gradients of the tables are sparse.
        firsts: for each key the first one with its table.

    Returns:
        ``[B, sum of D]``; ``[K, B]``, how many entries were pooled, and ``[B, sum of D]``, which id gave the
        largest: both only as far as a mode needs them for its gradient.
    """
    pooled, counts, picked = blank_results(tables, offsets, modes)
    found = []
    for k, (table, part) in enumerate(zip(tables, parts_of(offsets, lengths), strict=True)):
        ids, scale = part.ids(values), None if weights is None else part.take(weights)
        if not ids.shape[0] or not part.starts.shape[0]:
            found.append(table.new_zeros(part.starts.shape[0], table.shape[1]))
            continue
        out, _, count, best = aten._embedding_bag(
            table, ids, part.starts, False, modes[k], False, scale, False, paddings[k]
        )
        found.append(out)
        if modes[k] != SUM:
            counts[k] = count
        if modes[k] == MAX:
            left = sum(t.shape[1] for t in tables[:k])
            picked[:, left : left + table.shape[1]] = best
    return torch.cat(found, 1, out=pooled), counts, picked


def blank_results(tables: list[Tensor], offsets: Tensor, modes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the results of `keyed_pool`; counts and picked ids are empty where no mode needs them."""
    batch, width = offsets.shape[1] - 1, sum(t.shape[1] for t in tables)
    counted, chosen = any(mode != SUM for mode in modes), any(mode == MAX for mode in modes)
    return (
        tables[0].new_empty(batch, width),
        offsets.new_zeros(len(tables), batch if counted else 0),
        offsets.new_zeros(batch, width if chosen else 0),
    )


@torch.library.custom_op("subclasses::keyed_pool_backward", mutates_args=())
def keyed_pool_backward(  # noqa: PLR0913
    grad: Tensor,
    rows: list[int],
    widths: list[int],
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    weights: Tensor | None,
    counts: Tensor,
    picked: Tensor,
    modes: list[int],
    paddings: list[int],
    by_frequency: list[bool],
) -> list[Tensor]:
    """The gradient of each table of `keyed_pool`, ``rows x widths``."""
    grads = []
    shares = grad.split(widths, 1)
    chosen = picked.split(widths, 1) if picked.shape[1] else [picked] * len(rows)
    for k, part in enumerate(parts_of(offsets, lengths)):
        ids, scale = part.ids(values), None if weights is None else part.take(weights)
        if not ids.shape[0]:
            grads.append(grad.new_zeros(rows[k], widths[k]))
            continue
        grads.append(
            aten._embedding_bag_dense_backward(
                shares[k].contiguous(),
                ids,
                _bag_of_each(part, ids),
                counts[k],
                chosen[k].contiguous(),
                rows[k],
                by_frequency[k],
                modes[k],
                scale,
                paddings[k],
            )
        )
    return grads


@torch.library.custom_op("subclasses::keyed_pool_weights_backward", mutates_args=())
def keyed_pool_weights_backward(  # noqa: PLR0913
    grad: Tensor,
    tables: list[Tensor],
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    modes: list[int],
    paddings: list[int],
) -> Tensor:
    """The gradient of the weights of `keyed_pool`; 0 for an entry of no row."""
    found, left = grad.new_zeros(values.shape[0]), 0
    for k, part in enumerate(parts_of(offsets, lengths)):
        ids, right = part.ids(values), left + tables[k].shape[1]
        if ids.shape[0]:
            found[part.place] = aten._embedding_bag_per_sample_weights_backward(
                grad[:, left:right].contiguous(),
                tables[k],
                ids,
                part.starts,
                _bag_of_each(part, ids),
                modes[k],
                paddings[k],
            )
        left = right
    return found


def _bag_of_each(part: Part, ids: Tensor) -> Tensor:
    """The row of each entry of a part."""
    index = torch.arange(ids.shape[0], device=ids.device)
    return torch.searchsorted(part.starts, index, right=True) - 1


# ---- entry by entry --------------------------------------------------------------------------------------------


@torch.library.custom_op("subclasses::keyed_lookup", mutates_args=())
def keyed_lookup(  # noqa: PLR0913
    tables: list[Tensor],
    values: Tensor,
    offsets: Tensor,
    paddings: list[int],
    by_frequency: list[bool],
    sparse: bool,
    firsts: list[int],
) -> Tensor:
    """``[total, D]``: each entry looked up in its key's table ``[V, D]``; 0 for an entry of no key."""
    found = tables[0].new_zeros(values.shape[0], tables[0].shape[1])
    for table, part in zip(tables, parts_of(offsets, None), strict=True):
        found[part.place] = table.index_select(0, part.ids(values))
    return found


@torch.library.custom_op("subclasses::keyed_lookup_backward", mutates_args=())
def keyed_lookup_backward(
    grad: Tensor,
    rows: list[int],
    values: Tensor,
    offsets: Tensor,
    paddings: list[int],
    by_frequency: list[bool],
) -> list[Tensor]:
    """The gradient of each table of `keyed_lookup`."""
    return [
        aten.embedding_dense_backward(
            part.take(grad), part.ids(values), rows[k], paddings[k], by_frequency[k]
        )
        for k, part in enumerate(parts_of(offsets, None))
    ]


# ---- sparse ----------------------------------------------------------------------------------------------------


@torch.library.custom_op("subclasses::keyed_sparse_backward", mutates_args=())
def keyed_sparse_backward(  # noqa: PLR0913
    grad: Tensor,
    rows: list[int],
    widths: list[int],
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    weights: Tensor | None,
    counts: Tensor | None,
    modes: list[int],
    paddings: list[int],
    firsts: list[int],
) -> list[Tensor]:
    """The sparse gradient of each table of `keyed_pool`, or of `keyed_lookup` where there are no modes.

    One op from the cotangent to the gradients, one for each table that there is: Inductor has no place for a sparse
    tensor between ops that it changes, nor for a sum of two.
    """
    shares = grad.split(widths, 1) if modes else [grad] * len(rows)
    found_of: dict[int, list[tuple[Tensor, Tensor]]] = {k: [] for k in dict.fromkeys(firsts)}
    for k, part in enumerate(parts_of(offsets, lengths)):
        ids, share = part.ids(values), shares[k]
        if modes and modes[k] == MEAN and counts is not None:
            share = share / counts[k].clamp(min=1).unsqueeze(1).to(share.dtype)
        found = share.index_select(0, _bag_of_each(part, ids)) if modes else part.take(share)
        if weights is not None:
            found = found * part.take(weights).unsqueeze(1)
        if paddings[k] >= 0:
            kept = ids != paddings[k]
            ids, found = ids[kept], found[kept]
        found_of[firsts[k]].append((ids, found))
    return [
        sparse_rows(torch.cat([i for i, _ in found]), torch.cat([f for _, f in found]), rows[k], widths[k])
        for k, found in found_of.items()
    ]


def sparse_rows(ids: Tensor, found: Tensor, rows: int, width: int) -> Tensor:
    """``[rows, width]`` with ``found`` added at these rows."""
    return torch.sparse_coo_tensor(ids.unsqueeze(0), found, (rows, width), check_invariants=False)
