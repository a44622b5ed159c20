"""Groups rows of similar length for attention, and computes the indices of the entries of each group.

`make_plan` reads the offsets, so it runs inside the attention op, where tensors have data. A plan is cached as long as
the offsets tensor lives unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_WASTE = 0.8  # a row joins a group of width w if it has at least this times w entries ...
_SLACK = 2  # ... minus this many
_FULL = 0.85  # share of a padded table from which computing the padding takes less time than grouping rows
_MANY = 1024  # queries from which a plan may be full
_SCORES = 1 << 19  # maximum number of scores of a group and head, which bounds memory

# ---- the parts of a plan ---------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """The rows of an operand: offsets ``[B + 1]``, and lengths ``[B]``, or None if there are no gaps."""

    offsets: Tensor
    lengths: Tensor | None

    def read(self) -> tuple[list[int], list[int]]:
        """Returns the starts and the lengths of the rows, on the host."""
        starts = self.offsets.tolist()
        if self.lengths is not None:
            return starts[:-1], self.lengths.tolist()
        return starts[:-1], [end - start for start, end in pairwise(starts)]


@dataclass(frozen=True, eq=False)
class Side:
    """The ``count`` rows of a group in one operand with ``heads``, each padded to ``width`` entries.

    Attributes:
        source: ``[H, count, width]``, flattened: the item to read. The items of a table are all heads of entry 0, then
            all heads of entry 1, and so on. A padded position reads the last entry of its row, so no row reads another.
        target: the same for writing; a padded position writes to the entry past the end.
        padded: ``[count, width]``, True at padded positions. None if there are none; source and target are then the
            same tensor.
    """

    heads: int
    count: int
    width: int
    source: Tensor
    target: Tensor
    padded: Tensor | None

    def take(self, items: Tensor) -> Tensor:
        """Gathers the items ``[total * H, D]`` of a table into a contiguous ``[H, count, width, D]``."""
        return items.index_select(0, self.source).view(self.heads, self.count, self.width, items.shape[1])

    def put(self, items: Tensor, part: Tensor) -> None:
        """Writes a ``part`` with the shape of a result of `take` to the items ``[(total + 1) * H, D]`` of a table."""
        items.index_copy_(0, self.target, part.reshape(-1, items.shape[1]))

    def clear(self, part: Tensor) -> Tensor:
        """Sets the padded positions of a ``part`` with the shape of a result of `take` to 0, in place."""
        return part if self.padded is None else part.masked_fill_(self.padded.unsqueeze(-1), 0)


class Group(NamedTuple):
    """Rows that attend together; ``key_mask [count, keys]`` is False at padding; None if no query reaches it."""

    queries: Side
    keys: Side
    key_mask: Tensor | None


class Plan(NamedTuple):
    """All groups.

    Attributes:
        groups: the groups.
        complete: whether every entry of both operands is in a group.
        is_full: whether the queries are many, and both operands nearly fill a padded table.
    """

    groups: tuple[Group, ...]
    complete: bool
    is_full: bool


# ---- making a plan ---------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """The numbers of entries of both operands, and of heads; a plan depends on them and on the rows."""

    queries: int
    keys: int
    heads: int


def make_plan(queries: Rows, keys: Rows, sizes: Sizes, causal: bool) -> Plan:
    """Groups rows by length."""
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
    row_lengths = [[lengths[row][side] for row in rows] for side in (0, 1)]
    first = [[starts[side][row] for row in rows] for side in (0, 1)]
    queries, keys = (_side(first[side], row_lengths[side], sizes[side], sizes.heads) for side in (0, 1))
    # Under a causal mask no query attends to a later key. So only rows with more queries than keys reach padding.
    shows = any(k < keys.width and not (causal and q <= k) for q, k in zip(*row_lengths, strict=True))
    mask = torch.arange(keys.width) < torch.tensor(row_lengths[1]).unsqueeze(1) if shows else None
    return Group(queries, keys, mask)


def _similar(order: list[int], lengths: list[tuple[int, int]]) -> list[list[int]]:
    """Splits rows, sorted from long to short, where padding or the table of scores would grow too large."""
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
    """Returns the entries of rows that begin at ``starts``, padded to the longest row."""
    width, head = max(lengths), torch.arange(heads).unsqueeze(1)
    first, last = torch.tensor(starts).unsqueeze(1), torch.tensor(lengths).unsqueeze(1) - 1
    steps = torch.arange(width)
    source = (first + torch.minimum(steps, last)).flatten()
    items = (source * heads + head).flatten()
    if min(lengths) == width:
        return Side(heads, len(starts), width, items, items, None)
    padded = steps > last
    target = torch.where(padded, total, first + steps).flatten()
    return Side(heads, len(starts), width, items, (target * heads + head).flatten(), padded)


# ---- caching plans ---------------------------------------------------------------------------------------------

_plans: WeakIdKeyDictionary = WeakIdKeyDictionary()


def plan_for(queries: Rows, keys: Rows, sizes: Sizes, causal: bool) -> Plan:
    """Returns the plan of rows, which is cached as long as the query offsets live unchanged."""
    tensors = [t for t in (*queries, *keys) if t is not None]
    if any(t.is_inference() for t in tensors):  # inference tensors have no version counter
        return make_plan(queries, keys, sizes, causal)
    key = sizes, causal, [None if t is None else (id(t), t._version) for t in (*queries, *keys)]
    known = _plans.get(queries.offsets)
    if known is None or known[0] != key:
        # The cache holds the other tensors, so that no new tensor reuses their ids; its key must stay weak.
        others = [t for t in tensors if t is not queries.offsets]
        known = _plans[queries.offsets] = key, others, make_plan(queries, keys, sizes, causal)
    return known[2]
