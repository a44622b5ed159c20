"""The benchmarks of long rows and of bags compare what they time, on small sizes and without a compiler."""

from __future__ import annotations

import pytest
import torch

from bench import bags, goals, long_rows
from bench.timing import Timing


@pytest.fixture
def eager_only(monkeypatch):
    monkeypatch.setattr(long_rows, "WAYS", {way: lambda model: model for way in long_rows.WAYS})
    monkeypatch.setattr(long_rows, "WIDTH", 16)
    monkeypatch.setattr(torch, "compile", lambda fn: fn)
    monkeypatch.setattr(bags.desugar, "compile", lambda fn: fn)


@pytest.mark.slow
def test_batches_of_every_kind_have_one_loss(eager_only):
    rows = long_rows.draw_rows(4)
    lengths = [len(r) - 1 for r in rows]
    assert (min(lengths), max(lengths)) == (long_rows.SHORTEST, long_rows.LONGEST)
    steps = long_rows.make_steps(rows)
    long_rows.check_equal(steps)
    with pytest.raises(ValueError, match="expected equal losses"):
        long_rows.check_equal(steps | {("another", "eager"): lambda: 0.0})
    timings = {name: Timing(1e3, 1e3, 1e3) for name in steps}
    found = long_rows.rows_of(timings, 0.3, 4)
    assert {row.name for row in found} >= set(goals.LONG_ROWS)
    assert {row.timing.median for row in found} == {1.0}


def test_rows_in_tables_by_length_are_all_there():
    rows = long_rows.draw_rows(12)
    tables = long_rows.by_length(rows)
    assert sum(share for share, _ in tables) == pytest.approx(1)
    assert sum(len(tokens.lengths) for _, (tokens, _) in tables) == 12
    assert 1 < len(tables) <= 4
    for _, (tokens, targets) in tables:
        assert torch.equal(tokens.lengths, targets.lengths)
        for row, following in zip(tokens.to_tensors(), targets.to_tensors(), strict=True):
            assert torch.equal(row[1:], following[:-1])


@pytest.mark.parametrize("mode", bags.MODES)
def test_bags_are_looked_up_alike(eager_only, mode):
    tables = bags.make_tables(50, 4)
    calls = {
        name: bags.in_inference(call) if mode == "inference" else bags.in_training(call, tables)
        for name, call in bags.make_calls(tables, 3).items()
    }
    assert next(iter(calls)) == bags.ONE_BY_ONE and "EmbeddingBagCollection, desugar.compile" in calls
    bags.check_equal(calls)
    with pytest.raises(AssertionError):
        bags.check_equal(calls | {"wrong": lambda: [torch.full((3, 4), 7.0)] * bags.FEATURES})
