"""Runs of equal blocks: the longest first, what is inside of them, and what is too short to fold."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings, strategies as st

from desugar.explain.repeats import Run, find_runs


@pytest.mark.parametrize(
    ("items", "runs"),
    [
        (["embed", *["norm", "linear", "relu"] * 36, "head"], [Run(1, 3, 36)]),
        (["a", "b", "a", "c"] * 5, [Run(0, 4, 5)]),  # a block may hold an item twice
        (["start", *["up", "down"] * 8, "end"] * 4, [Run(0, 18, 4, "", (Run(1, 2, 8),))]),
        ([*["a", "b"] * 6, "middle", *["c", "d", "e"] * 7], [Run(0, 2, 6), Run(13, 3, 7)]),
        # Nobody folds a list that is read at a glance.
        *((items, []) for items in ([], ["a"], ["a"] * 7, ["a", "b", "c", "d"] * 2, list("abcdefghijkl"))),
    ],
)
def test_runs_of_equal_blocks(items, runs):
    assert list(find_runs(items)) == runs


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 2), max_size=60))
def test_a_run_is_what_it_says(items):
    end = 0
    for run in find_runs(items):
        assert run.start >= end and run.count >= 3
        end = run.end
        block = items[run.start : run.start + run.length]
        assert items[run.start : run.end] == block * run.count


def test_a_long_graph_takes_no_time():
    layer = [f"op{n % 17}" for n in range(120)]
    items = [*map(str, range(300)), *layer * 60, *map(str, range(300))]
    start = time.perf_counter()
    (run,) = find_runs(items)
    assert (run.length, run.count) == (120, 60)
    assert time.perf_counter() - start < 20  # seconds; a tenth of it on an idle machine
