"""Sends entries to the ranks that hold their rows, and returns the results to the ranks of the batches.

Each entry goes to one rank. There the entries of all ranks are sorted by key, so that one lookup for each key serves
all ranks. Three collectives send the lengths of the rows, the ids, and the weights if there are any. One collective
returns the results. Its backward is one collective as well, and the backward of the weights is another.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subclasses.keyed.rows import offsets_of
from subclasses.keyed.sharded.exchange import Agreement, Ranks, exchange
from subclasses.keyed.sharded.plan import Rows

# ---- entries of a batch ----------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """The existing entries of a batch, in order of keys and rows."""

    positions: Tensor
    """``[n]``, the index of each entry in the values of the keyed tensor."""
    ids: Tensor
    """``[n]``, int64."""
    cells: Tensor
    """``[n]``, the row of each entry, counted over all keys: ``key * B + row``."""
    batch_size: int

    @property
    def keys(self) -> Tensor:
        """The index of the key of each entry, ``[n]``."""
        return self.cells.div(max(self.batch_size, 1), rounding_mode="floor")

    def select(self, mask: Tensor) -> Batch:
        """Returns the entries that a mask selects."""
        return self._replace(positions=self.positions[mask], ids=self.ids[mask], cells=self.cells[mask])


def batch_of(ids: Any) -> Batch:
    """Returns the existing entries of a keyed tensor; reads the lengths."""
    lengths = ids.lengths
    begun = lengths.cumsum(0) - lengths
    cells = torch.repeat_interleave(lengths)
    within = torch.arange(cells.shape[0], device=cells.device) - begun[cells]
    positions = ids.offsets[:, :-1].flatten()[cells] + within
    return Batch(positions, ids._raw_values.index_select(0, positions).long(), cells, ids.batch_size)


def find_bad_key(batch: Batch, totals: Sequence[int]) -> int | None:
    """Returns the index of the first key with an id outside of its table, or None; reads the ids."""
    if not batch.ids.shape[0]:
        return None
    bad = (batch.ids < 0) | (batch.ids >= batch.ids.new_tensor(totals)[batch.keys])
    return int(batch.keys[bad][0]) if bool(bad.any()) else None


def without_padding(batch: Batch, paddings: Sequence[int]) -> Batch:
    """Returns a batch without entries that have the padding id of their key; -1 for none."""
    if all(p < 0 for p in paddings) or not batch.ids.shape[0]:
        return batch
    return batch.select(batch.ids != batch.ids.new_tensor(paddings)[batch.keys])


# ---- routes ----------------------------------------------------------------------------------------------------


class Route(NamedTuple):
    """The routes of the entries of one exchange. Ranks are in the order of the mesh."""

    ranks: Ranks
    batch_sizes: list[int]
    held: list[list[int]]
    """For each rank, the indices of the keys whose tables have rows on it."""
    positions: Tensor
    """``[n]``, the entries in the order in which they are sent, as positions in the values."""
    counts: Tensor
    """``[ranks, K, B]``, the number of entries of each row that go to each rank."""
    sent: list[int]
    """The number of entries for each rank."""
    received: list[int]
    """The number of entries from each rank."""
    sorting: Tensor
    """``[m]``, sorts the received entries by key."""
    ids: Tensor
    """``[m]``, indices into the rows of this rank, sorted by key."""
    offsets: Tensor
    """``[held keys, sum of all ranks' B + 1]``, the rows of the sorted entries."""

    @property
    def here(self) -> list[int]:
        """The keys that are looked up on this rank."""
        return self.held[self.ranks.rank]

    def holders(self, key: int) -> int:
        """Returns the number of ranks that hold rows of a key's table."""
        return sum(key in keys for keys in self.held)

    def send_weights(self, weights: Tensor, needs_gradient: bool) -> tuple[Tensor, Tensor]:
        """Returns the weights sorted as the entries, and as received; they require grad if a rank's weights do."""
        anchor = weights.new_empty(0).requires_grad_(needs_gradient)
        sent = weights.index_select(0, self.positions)
        came = exchange(sent, self.sent, self.received, self.ranks, [anchor])
        return came.index_select(0, self.sorting), came

    def return_rows(self, pooled: Tensor, widths: Sequence[int], anchors: Sequence[Tensor]) -> Tensor:
        """Sends pooled rows back; differentiable.

        Args:
            pooled: ``[sum of all ranks' B, sum of D of the held keys]``.
            widths: ``D`` of each key.
            anchors: tensors that get gradients of zeros; one requires grad on every rank if one does on any rank.

        Returns:
            ``[ranks * held keys * B * D]``: for each rank the rows that `split_rows` splits.
        """
        batch_size = self.batch_sizes[self.ranks.rank]
        sent = [size * pooled.shape[1] for size in self.batch_sizes]
        received = [batch_size * sum(widths[k] for k in keys) for keys in self.held]
        return exchange(pooled.flatten(), sent, received, self.ranks, anchors)

    def split_rows(self, received: Tensor, widths: Sequence[int]) -> dict[tuple[int, int], Tensor]:
        """Splits the result of `return_rows` into ``[B, D]`` by rank and key."""
        sums = [sum(widths[k] for k in keys) for keys in self.held]
        batch_size = self.batch_sizes[self.ranks.rank]
        rows_by_key = {}
        parts = received.split([batch_size * width for width in sums])
        for rank, (keys, part, width) in enumerate(zip(self.held, parts, sums, strict=True)):
            columns = part.view(batch_size, width).split([widths[k] for k in keys], 1)
            rows_by_key |= {(rank, k): column for k, column in zip(keys, columns, strict=True)}
        return rows_by_key

    def return_entries(self, rows: Tensor, total: int, anchors: Sequence[Tensor]) -> Tensor:
        """Sends the rows of the sorted entries back, ``[m, D]``; returns ``[total, D]`` in the order of the values."""
        unsorted = rows.index_select(0, self.sorting.argsort())
        came = exchange(unsorted, self.received, self.sent, self.ranks, anchors)
        return came.new_zeros(total, came.shape[1]).index_copy(0, self.positions, came)


def make_route(batch: Batch, rows: Sequence[Rows], agreement: Agreement, ranks: Ranks) -> Route:
    """Sends lengths and ids to the ranks that hold the rows.

    Args:
        batch: the entries of this rank.
        rows: the placement of the rows of each key's table.
        agreement: the facts of all batches.
        ranks: the process group.
    """
    held_keys = [[k for k, r in enumerate(rows) if r.count_on(rank)] for rank in range(ranks.count)]
    owners, local_ids = _owners(batch, rows)
    order = owners.argsort(stable=True)
    size = len(rows) * batch.batch_size
    counts = torch.bincount(owners * size + batch.cells, minlength=ranks.count * size)
    counts = counts.view(ranks.count, len(rows), batch.batch_size)
    lengths = _send_lengths(counts, held_keys, agreement.batch_sizes, ranks)
    sent = counts.sum((1, 2)).tolist()
    totals = torch.stack([part.sum(1) for part in lengths])
    received = totals.sum(1).tolist()
    came = exchange(local_ids[order].to(agreement.id_dtype), sent, received, ranks)
    key_of_total = torch.arange(totals.shape[1], device=totals.device).repeat(ranks.count)
    sorting = torch.repeat_interleave(key_of_total, totals.flatten()).argsort(stable=True)
    return Route(
        ranks,
        agreement.batch_sizes,
        held_keys,
        batch.positions[order],
        counts,
        sent,
        received,
        sorting,
        came.index_select(0, sorting).long(),
        offsets_of(torch.cat(lengths, 1)),
    )


def _owners(batch: Batch, rows: Sequence[Rows]) -> tuple[Tensor, Tensor]:
    """Returns the rank that holds each entry's row, and the index of that row there."""
    first, per_rank = (
        batch.ids.new_tensor(column)[batch.keys] for column in zip(*(r[1:] for r in rows), strict=True)
    )
    steps = batch.ids.div(per_rank, rounding_mode="floor")
    return first + steps, batch.ids - steps * per_rank


def _send_lengths(
    counts: Tensor, held_keys: list[list[int]], batch_sizes: list[int], ranks: Ranks
) -> list[Tensor]:
    """Sends the lengths of rows to the ranks that hold their keys; returns ``[held keys, B]`` from each rank."""
    parts = [count[keys].flatten() for count, keys in zip(counts, held_keys, strict=True)]
    here = len(held_keys[ranks.rank])
    received = [here * size for size in batch_sizes]
    came = exchange(torch.cat(parts), [p.shape[0] for p in parts], received, ranks)
    ends = [*accumulate(received, initial=0)]
    return [
        came[start : start + here * size].view(here, size)
        for start, size in zip(ends, batch_sizes, strict=False)
    ]
