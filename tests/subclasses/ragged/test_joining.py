"""Joining rows and entries, on both layouts, with a loop over the rows as judge."""

from __future__ import annotations

import pytest
import torch

from tests.subclasses.ragged.both import LAYOUTS, LENGTHS, judge_rows, make
from tests.subclasses.ragged.judge import desugared, eager, make_batch

ways = pytest.mark.parametrize("way", [eager, desugared], ids=lambda w: w.__name__)
layouts = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.mark.sweep(2)
@ways
@layouts
def test_entries_of_each_row(layout, way):
    judge_rows(
        layout,
        lambda x: torch.cat([x, x * 2, x[:, :1]], 1),
        lambda row, _: torch.cat([row, row * 2, row[:1]]),
        way=way,
    )


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dim", [0, 1, -1])
@ways
@layouts
def test_a_list_of_nothing_is_skipped(layout, way, dim):
    """As for dense tensors, whatever their dimensions; a cache of transformers begins with one."""
    calls = {0: lambda x: torch.cat([torch.tensor([]), x]), 1: lambda x: torch.cat([x, torch.tensor([])], 1)}
    last = lambda x: torch.cat([torch.tensor([]), x], -1)  # noqa: E731
    judge_rows(layout, calls.get(dim, last), lambda row, _: row, way=way)


@pytest.mark.sweep(6)
@ways
@layouts
def test_dense_entries_beside_each_row(layout, way):
    first = torch.randn(4, dtype=torch.float64, requires_grad=True)
    many = torch.randn(4, 2, 4, dtype=torch.float64, requires_grad=True)
    judge_rows(
        layout,
        lambda x, first, many: torch.cat([first.expand(4, 1, 4), x, many], 1),
        lambda row, i, first, many: torch.cat([first[None], row, many[i]]),
        [first, many],
        way=way,
    )


@layouts
def test_dense_rows_after_rows(layout):
    batch, dense = make(layout), torch.randn(2, 6, 4, dtype=torch.float64)
    torch.testing.assert_close(torch.cat([dense, batch.x]).to_tensors(), [*dense, *batch.rows])


@pytest.mark.sweep(2)
@ways
@layouts
def test_rows_after_rows(layout, way):
    batch = make(layout)
    got = way(lambda x: torch.cat([x, x[1:, :2] * 2]))(batch.x)
    expected = [*batch.rows, *(row[:2] * 2 for row in batch.rows[1:])]
    torch.testing.assert_close(got.to_tensors(), expected)
    cotangents = [torch.randn_like(row) for row in expected]
    grads = [torch.autograd.grad(rows, batch.leaf, cotangents)[0] for rows in (got.to_tensors(), expected)]
    torch.testing.assert_close(*grads)


@layouts
def test_features(layout):
    judge_rows(layout, lambda x: torch.cat([x, x * 2], -1), lambda row, _: torch.cat([row, row * 2], -1))
    judge_rows(
        layout, lambda x: torch.stack([x, x * 2], 2, out=None), lambda row, _: torch.stack([row, row * 2], 1)
    )


def test_ragged_dim_2():
    batch = make_batch("ragged dim 2")
    assert [row.shape[1] for row in batch.rows] == LENGTHS
    parts = torch.cat([batch.x, batch.x * 2], 2).to_tensors()
    torch.testing.assert_close(parts, [torch.cat([row, row * 2], 1) for row in batch.rows])
    parts = torch.cat([batch.x, batch.x * 2], 0).to_tensors()
    torch.testing.assert_close(parts, [*batch.rows, *(row * 2 for row in batch.rows)])


def test_batches_without_rows():
    x = make_batch(lengths=[]).x
    y = make_batch(lengths=[2, 0]).x
    assert torch.cat([x, y, x]).row_lengths().tolist() == [2, 0]
    assert torch.cat([x, x], 1).row_lengths().tolist() == []


@layouts
def test_what_is_refused(layout):
    x = make(layout).x
    for refused in (
        lambda: torch.cat([x, x[..., :2]]),
        lambda: torch.cat([x, x.unsqueeze(-1)], 1),
        lambda: torch.cat([x, torch.zeros(3, 2, 4, dtype=torch.float64)], 1),
        lambda: torch.cat([torch.zeros(2, 4, dtype=torch.float64), x], 1),
        lambda: torch.cat([x, x], -1, out=torch.zeros(())),
        lambda: torch.stack([x, x], -1, out=torch.zeros(())),
    ):
        with pytest.raises(NotImplementedError, match=r"do not join|into a new one|as many dimensions"):
            refused()
