"""Lookups in the tables of several keys, as one op each.

Where the rows of a key begin and end in the values is data, so outside of a graph each key's part is cut out and goes
to PyTorch's own kernel. In a graph a cut would be a size that depends on data; there one op looks up all keys, reads
the ends inside, and has results whose sizes are known: no graph is made for other lengths, none read waits outside.

An op's backward gives dense gradients, and another one sparse gradients. All take the same `Entries` and `Lookups`,
spread over their arguments: an op of PyTorch's takes no records.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten
SUM, MEAN, MAX = 0, 1, 2  # PyTorch's numbers
EACH = -1  # nothing is pooled

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


# ---- what all ops take -----------------------------------------------------------------------------------------


class Entries(NamedTuple):
    """What is looked up: ids one after another, and where the rows of each key are among them."""

    values: Tensor
    """``[total]``, ids."""
    offsets: Tensor
    """``[K, B + 1]``, where each row begins."""
    lengths: Tensor | None = None
    """``[K, B]``, for rows with gaps between them."""
    weights: Tensor | None = None
    """``[total]``, factors of what is looked up."""

    def of_keys(self, places: list[int]) -> Entries:
        """The same without the other keys."""
        offsets, lengths = (
            None if t is None else torch.stack([t[k] for k in places]) for t in (self.offsets, self.lengths)
        )
        return self._replace(offsets=offsets, lengths=lengths)

    def by_key(self) -> Iterator[tuple[Part, Tensor, Tensor | None]]:
        """For each key its part, its ids, and its factors; reads the offsets."""
        for part in parts_of(self.offsets, self.lengths):
            yield part, part.ids(self.values), None if self.weights is None else part.take(self.weights)


class Lookups(NamedTuple):
    """How it is looked up, key by key."""

    modes: list[int]
    """`SUM`, `MEAN`, `MAX` (of each column), or `EACH`."""
    paddings: list[int]
    """Ids that count as absent, -1 for none."""
    by_frequency: list[bool]
    """Whether gradients are divided by how often an id occurs."""
    sparse: bool
    """Whether the gradients of the tables are sparse."""
    firsts: list[int]
    """For each key the first one with its table."""


ENTRIES = "Tensor values, Tensor offsets, Tensor? lengths, Tensor? weights"
LOOKUPS = "int[] modes, int[] paddings, bool[] by_frequency, bool sparse, int[] firsts"


def split_arguments(spread: tuple[Any, ...]) -> tuple[Entries, Lookups]:
    """What all ops take, from the arguments that it is spread over."""
    return Entries(*spread[:4]), Lookups(*spread[4:])


def define(name: str, schema: str) -> Any:
    """A decorator that makes an op which writes to nothing."""
    return torch.library.custom_op(f"subclasses::{name}", mutates_args=(), schema=schema)


# ---- pooled ----------------------------------------------------------------------------------------------------


@define("keyed_pool", f"(Tensor[] tables, {ENTRIES}, {LOOKUPS}) -> (Tensor, Tensor, Tensor)")
def keyed_pool(tables: list[Tensor], *spread: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of each key, looked up in its table ``[V, D]`` and pooled.

    Returns:
        ``[B, sum of D]``; ``[K, B]``, how many entries were pooled, and ``[B, sum of D]``, which id gave the
        largest: both only as far as a mode needs them for its gradient.
    """
    entries, how = split_arguments(spread)
    pooled, counts, picked = blank_results(tables, entries, how)
    found, left = [], 0
    for k, (part, ids, scale) in enumerate(entries.by_key()):
        table, right = tables[k], left + tables[k].shape[1]
        if not ids.shape[0] or not part.starts.shape[0]:
            found.append(table.new_zeros(part.starts.shape[0], table.shape[1]))
        else:
            out, _, count, best = aten._embedding_bag(
                table, ids, part.starts, False, how.modes[k], False, scale, False, how.paddings[k]
            )
            found.append(out)
            if how.modes[k] != SUM:
                counts[k] = count
            if how.modes[k] == MAX:
                picked[:, left:right] = best
        left = right
    return torch.cat(found, 1, out=pooled), counts, picked


def blank_results(tables: list[Tensor], entries: Entries, how: Lookups) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the results of `keyed_pool`; counts and picked ids are empty where no mode needs them."""
    offsets, width = entries.offsets, sum(t.shape[1] for t in tables)
    batch = offsets.shape[1] - 1
    counted, chosen = any(mode != SUM for mode in how.modes), any(mode == MAX for mode in how.modes)
    return (
        tables[0].new_empty(batch, width),
        offsets.new_zeros(len(tables), batch if counted else 0),
        offsets.new_zeros(batch, width if chosen else 0),
    )


@define(
    "keyed_pool_backward",
    f"(Tensor grad, int[] rows, int[] widths, Tensor counts, Tensor picked, {ENTRIES}, {LOOKUPS}) -> Tensor[]",
)
def keyed_pool_backward(
    grad: Tensor, rows: list[int], widths: list[int], counts: Tensor, picked: Tensor, *spread: Any
) -> list[Tensor]:
    """The gradient of each table of `keyed_pool`, ``rows x widths``."""
    entries, how = split_arguments(spread)
    grads = []
    shares = grad.split(widths, 1)
    chosen = picked.split(widths, 1) if picked.shape[1] else [picked] * len(rows)
    for k, (part, ids, scale) in enumerate(entries.by_key()):
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
                how.by_frequency[k],
                how.modes[k],
                scale,
                how.paddings[k],
            )
        )
    return grads


@define("keyed_pool_weights_backward", f"(Tensor grad, Tensor[] tables, {ENTRIES}, {LOOKUPS}) -> Tensor")
def keyed_pool_weights_backward(grad: Tensor, tables: list[Tensor], *spread: Any) -> Tensor:
    """The gradient of the weights of `keyed_pool`; 0 for an entry of no row."""
    entries, how = split_arguments(spread)
    found, left = grad.new_zeros(entries.values.shape[0]), 0
    for k, (part, ids, _) in enumerate(entries.by_key()):
        right = left + tables[k].shape[1]
        if ids.shape[0]:
            found[part.place] = aten._embedding_bag_per_sample_weights_backward(
                grad[:, left:right].contiguous(),
                tables[k],
                ids,
                part.starts,
                _bag_of_each(part, ids),
                how.modes[k],
                how.paddings[k],
            )
        left = right
    return found


def _bag_of_each(part: Part, ids: Tensor) -> Tensor:
    """The row of each entry of a part."""
    index = torch.arange(ids.shape[0], device=ids.device)
    return torch.searchsorted(part.starts, index, right=True) - 1


# ---- entry by entry --------------------------------------------------------------------------------------------


@define("keyed_lookup", f"(Tensor[] tables, {ENTRIES}, {LOOKUPS}) -> Tensor")
def keyed_lookup(tables: list[Tensor], *spread: Any) -> Tensor:
    """``[total, D]``: each entry looked up in its key's table ``[V, D]``; 0 for an entry of no key."""
    entries, _ = split_arguments(spread)
    found = tables[0].new_zeros(entries.values.shape[0], tables[0].shape[1])
    for table, (part, ids, _) in zip(tables, entries.by_key(), strict=True):
        found[part.place] = table.index_select(0, ids)
    return found


@define("keyed_lookup_backward", f"(Tensor grad, int[] rows, {ENTRIES}, {LOOKUPS}) -> Tensor[]")
def keyed_lookup_backward(grad: Tensor, rows: list[int], *spread: Any) -> list[Tensor]:
    """The gradient of each table of `keyed_lookup`."""
    entries, how = split_arguments(spread)
    return [
        aten.embedding_dense_backward(part.take(grad), ids, rows[k], how.paddings[k], how.by_frequency[k])
        for k, (part, ids, _) in enumerate(entries.by_key())
    ]


# ---- sparse ----------------------------------------------------------------------------------------------------


@define(
    "keyed_sparse_backward",
    f"(Tensor grad, int[] rows, int[] widths, Tensor? counts, {ENTRIES}, {LOOKUPS}) -> Tensor[]",
)
def keyed_sparse_backward(
    grad: Tensor, rows: list[int], widths: list[int], counts: Tensor | None, *spread: Any
) -> list[Tensor]:
    """The sparse gradient of each table of `keyed_pool`, or of `keyed_lookup`.

    One op from the cotangent to the gradients, one for each table that there is: Inductor has no place for a sparse
    tensor between ops that it changes, nor for a sum of two.
    """
    entries, how = split_arguments(spread)
    pooled = EACH not in how.modes
    shares = grad.split(widths, 1) if pooled else [grad] * len(rows)
    found_of: dict[int, list[tuple[Tensor, Tensor]]] = {k: [] for k in dict.fromkeys(how.firsts)}
    for k, (part, ids, scale) in enumerate(entries.by_key()):
        share = shares[k]
        if how.modes[k] == MEAN and counts is not None:
            share = share / counts[k].clamp(min=1).unsqueeze(1).to(share.dtype)
        found = share.index_select(0, _bag_of_each(part, ids)) if pooled else part.take(share)
        if scale is not None:
            found = found * scale.unsqueeze(1)
        if how.paddings[k] >= 0:
            kept = ids != how.paddings[k]
            ids, found = ids[kept], found[kept]
        found_of[how.firsts[k]].append((ids, found))
    return [
        sparse_rows(torch.cat([i for i, _ in found]), torch.cat([f for _, f in found]), rows[k], widths[k])
        for k, found in found_of.items()
    ]


def sparse_rows(ids: Tensor, found: Tensor, rows: int, width: int) -> Tensor:
    """``[rows, width]`` with ``found`` added at these rows."""
    return torch.sparse_coo_tensor(ids.unsqueeze(0), found, (rows, width), check_invariants=False)
