"""Runs of equal blocks in a sequence: the layers of a model, among its ops, graph lines, tensors.

A run of 36 layers is found by its period: from its start on, each item equals the item one period later.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from desugar.ir.record_base import Record

_LEAST_BLOCKS, _LEAST_ITEMS = 3, 8  # a shorter run is read faster than its summary


@dataclass(frozen=True, slots=True)
class Run(Record):
    """`count` equal blocks of `length` items each, the first from item `start` on.

    Attributes:
        label: What the blocks are, such as `layers[0] … layers[35]`; empty if unknown.
        inner: Runs inside the first block.
    """

    start: int
    length: int
    count: int
    label: str = ""
    inner: tuple[Run, ...] = ()

    @property
    def end(self) -> int:
        """The first item after the run."""
        return self.start + self.length * self.count


def find_runs(items: Sequence[Hashable]) -> tuple[Run, ...]:
    """Returns the runs of equal blocks, in order; the longest is found first, then those around and inside of it."""
    numbers: dict[Hashable, int] = {}
    return tuple(_runs([numbers.setdefault(item, len(numbers)) for item in items], 0, len(items)))


def _runs(items: Sequence[int], start: int, end: int) -> Iterator[Run]:
    """The runs between two items."""
    best = _longest(items, start, end)
    if best is None:
        return
    yield from _runs(items, start, best.start)
    yield replace(best, inner=tuple(_runs(items, best.start, best.start + best.length)))
    yield from _runs(items, best.end, end)


def _longest(items: Sequence[int], start: int, end: int) -> Run | None:
    """The run that covers most items; of two that cover the same, the one of the shorter block."""
    found = [run for period in _periods(items, start, end) for run in _of_period(items, start, end, period)]
    return max(found, key=lambda run: (run.length * run.count, -run.length), default=None)


def _periods(items: Sequence[int], start: int, end: int) -> list[int]:
    """Distances at which so many items equal that there may be a run."""
    part, longest = torch.tensor(items[start:end], device="cpu"), (end - start) // _LEAST_BLOCKS
    equal = {period: int((part[period:] == part[:-period]).sum()) for period in range(1, longest + 1)}
    return [period for period, count in equal.items() if count >= (_LEAST_BLOCKS - 1) * period]


def _of_period(items: Sequence[int], start: int, end: int, period: int) -> Iterator[Run]:
    """The runs of one period."""
    first = start
    for place in range(start, end - period + 1):
        if place < end - period and items[place] == items[place + period]:
            continue
        count = (place - first) // period + 1
        if count >= _LEAST_BLOCKS and count * period >= _LEAST_ITEMS:
            yield Run(first, period, count)
        first = place + 1
