"""Which rows attend together: rows of about one length form a group, with the entries that each group reads.

A plan reads the offsets, so it is made inside the attention op, where data is there. It is kept for as long
as the offsets tensor lives and nobody writes to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_WASTE = 0.8  # a row joins a group when it has at least this share of the group's width ...
_SLACK = 2  # ... or lacks no more entries than this besides
_FULL = 0.85  # from this share of a padded table on, its padding takes less time than to move rows to groups
_MANY = 1024  # entries from which that is said
_SCORES = 1 << 19  # scores of a group and head at most: what is computed at a time stays small

# ---- the parts of a plan ---------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Where the rows of an operand lie: offsets ``[B + 1]``, and ``[B]`` lengths or None if there are no gaps."""

    offsets: Tensor
    lengths: Tensor | None

    def read(self) -> tuple[list[int], list[int]]:
        """Beginnings and lengths of the rows, on the host."""
        starts = self.offsets.tolist()
        if self.lengths is not None:
            return starts[:-1], self.lengths.tolist()
        return starts[:-1], [end - start for start, end in pairwise(starts)]


@dataclass(frozen=True, eq=False)
class Side:
    """The ``count`` rows of a group in one operand, each padded to ``width`` entries.

    Attributes:
        source: ``[H, count, width]``, flattened: the item to read of a table whose items are the heads of entry 0,
            those of entry 1, ... A padded place reads its row's last entry: nothing of one row reaches another.
        target: the same for writing; a padded place writes to the entry past the end.
        padded: ``[count, width]``, which places are padded; None: none, and then source and target are one.
    """

    count: int
    width: int
    source: Tensor
    target: Tensor
    padded: Tensor | None

    def take(self, table: Tensor) -> Tensor:
        """``[total, H, D]``, contiguous, to ``[H, count, width, D]``, contiguous."""
        items = table.view(-1, table.shape[2]).index_select(0, self.source)
        return items.view(table.shape[1], self.count, self.width, table.shape[2])

    def put(self, table: Tensor, part: Tensor) -> None:
        """Write a ``part`` as `take` gives it to a table ``[total + 1, H, D]``."""
        table.view(-1, table.shape[2]).index_copy_(0, self.target, part.reshape(-1, table.shape[2]))

    def clear(self, part: Tensor) -> Tensor:
        """Set the padded places of a ``part`` as `take` gives it to 0, in place."""
        return part if self.padded is None else part.masked_fill_(self.padded.unsqueeze(-1), 0)


class Group(NamedTuple):
    """Rows that attend together; ``key_mask`` (``[count, keys]``, True for real ones) where padding would show."""

    queries: Side
    keys: Side
    key_mask: Tensor | None


class Plan(NamedTuple):
    """All groups.

    Attributes:
        groups: the groups.
        complete: whether every entry of both operands is in one.
        is_full: whether the queries are many, and both operands nearly fill a padded table.
    """

    groups: tuple[Group, ...]
    complete: bool
    is_full: bool


# ---- making it -------------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """What a plan depends on besides the rows: the number of entries of each operand, and of heads."""

    queries: int
    keys: int
    heads: int


def make_plan(queries: Rows, keys: Rows, sizes: Sizes, causal: bool) -> Plan:
    """Group rows by length."""
    starts, counts = zip(queries.read(), keys.read(), strict=True)
    lengths = list(zip(*counts, strict=True))
    order = sorted(
        (row for row, pair in enumerate(lengths) if min(pair)), key=lengths.__getitem__, reverse=True
    )
    groups = tuple(_group(rows, starts, lengths, sizes, causal) for rows in _similar(order, lengths))
    covered = tuple(sum(lengths[row][side] for row in order) for side in (0, 1))
    tables = (len(lengths) * max(counts[side], default=0) for side in (0, 1))
    is_full = covered[0] >= _MANY and all(n >= _FULL * m for n, m in zip(covered, tables, strict=True))
    return Plan(groups, covered == sizes[:2], is_full)


def _group(rows: list[int], starts, lengths, sizes: Sizes, causal: bool) -> Group:
    found = [[lengths[row][side] for row in rows] for side in (0, 1)]
    first = [[starts[side][row] for row in rows] for side in (0, 1)]
    queries, keys = (_side(first[side], found[side], sizes[side], sizes.heads) for side in (0, 1))
    # Under the mask a query sees no later key, so padding shows only to rows with more queries than keys.
    shows = any(k < keys.width and not (causal and q <= k) for q, k in zip(*found, strict=True))
    mask = torch.arange(keys.width) < torch.tensor(found[1]).unsqueeze(1) if shows else None
    return Group(queries, keys, mask)


def _similar(order: list[int], lengths: list[tuple[int, int]]) -> list[list[int]]:
    """Split rows, which come from long to short, where padding or the table of scores would grow too large."""
    groups: list[list[int]] = []
    for row in order:
        if groups and _fits(lengths[row], lengths[groups[-1][0]], len(groups[-1])):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _fits(pair: tuple[int, int], widest: tuple[int, int], count: int) -> bool:
    enough = all(widest[d] * _WASTE - _SLACK <= pair[d] <= widest[d] for d in (0, 1))
    return enough and (count + 1) * widest[0] * widest[1] <= _SCORES


def _side(starts: list[int], lengths: list[int], total: int, heads: int) -> Side:
    """The entries of rows that begin at ``starts``, padded to the longest."""
    width, head = max(lengths), torch.arange(heads).unsqueeze(1)
    first, last = torch.tensor(starts).unsqueeze(1), torch.tensor(lengths).unsqueeze(1) - 1
    steps = torch.arange(width)
    source = (first + torch.minimum(steps, last)).flatten()
    items = (source * heads + head).flatten()
    if min(lengths) == width:
        return Side(len(starts), width, items, items, None)
    padded = steps > last
    target = torch.where(padded, total, first + steps).flatten()
    return Side(len(starts), width, items, (target * heads + head).flatten(), padded)


# ---- keeping it ------------------------------------------------------------------------------------------------

_plans: WeakIdKeyDictionary = WeakIdKeyDictionary()


def plan_for(queries: Rows, keys: Rows, sizes: Sizes, causal: bool) -> Plan:
    """The plan of these rows, made once for as long as the query offsets live unchanged."""
    tensors = [t for t in (*queries, *keys) if t is not None]
    if any(t.is_inference() for t in tensors):  # such a tensor does not tell when it was written to
        return make_plan(queries, keys, sizes, causal)
    key = sizes, causal, [None if t is None else (id(t), t._version) for t in (*queries, *keys)]
    known = _plans.get(queries.offsets)
    if known is None or known[0] != key:
        # Holding the other tensors keeps their ids from being given to new ones; the key itself must stay weak.
        held = [t for t in tensors if t is not queries.offsets]
        known = _plans[queries.offsets] = key, held, make_plan(queries, keys, sizes, causal)
    return known[2]
