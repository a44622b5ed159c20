"""Joining rows and entries, on both layouts, with a loop over the rows as judge."""

from __future__ import annotations

import pytest
import torch

from subclasses.ragged import PaddedTensor
from tests.subclasses.ragged.both import LAYOUTS, check_parts, judge_rows, make, random, row_dim
from tests.subclasses.ragged.judge import WAYS, desugared, eager, make_batch
from tests.subclasses.ragged.padded_judge import PLACES, make_table

ways = pytest.mark.parametrize("way", [eager, desugared], ids=lambda w: w.__name__)
all_ways = pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
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
    judge_rows(
        layout,
        lambda x, first, many: torch.cat([first.expand(4, 1, 4), x, many], 1),
        lambda row, i, first, many: torch.cat([first[None], row, many[i]]),
        [random(4), random(4, 2, 4)],
        way=way,
    )


@pytest.mark.sweep(2)
@ways
@layouts
def test_dense_rows_before_and_after_rows(layout, way):
    batch, dense = make(layout), random(2, 6, 4)
    got = way(lambda x, p: torch.cat([p, x, p]) * 1)(batch.x, dense)
    check_parts(batch, got, [*dense, *batch.rows, *dense], [dense])


@pytest.mark.sweep(2)
@ways
@layouts
def test_rows_after_rows(layout, way):
    batch = make(layout)
    got = way(lambda x: torch.cat([x, x[1:, :2] * 2]))(batch.x)
    check_parts(batch, got, [*batch.rows, *(row[:2] * 2 for row in batch.rows[1:])])


@layouts
def test_features(layout):
    judge_rows(layout, lambda x: torch.cat([x, x * 2], -1), lambda row, _: torch.cat([row, row * 2], -1))
    judge_rows(
        layout, lambda x: torch.stack([x, x * 2], 2, out=None), lambda row, _: torch.stack([row, row * 2], 1)
    )


@pytest.mark.parametrize("way", [eager, desugared], ids=lambda w: w.__name__)
def test_dense_features_before_features(way):
    judge_rows(
        "padded",
        lambda x, p: torch.cat([p, x], 2),
        lambda row, i, p: torch.cat([p[i, : len(row)], row], 1),
        [random(4, 7, 2)],
        way=way,
    )


elsewhere = pytest.mark.parametrize("layout", [*PLACES, "ragged dim 2"])


@pytest.mark.sweep(8)
@elsewhere
@all_ways
def test_entries_elsewhere(layout, way):
    a, b = make(layout), make(layout, [1, 0, 0, 6], width=6)
    place = row_dim(a)
    got = way(lambda x, y: torch.cat([x, y, x * 2], a.ragged_dim) * 1)(a.x, b.x)
    pairs = zip(a.rows, b.rows, strict=True)
    check_parts(a, got, [torch.cat([p, q, p * 2], place) for p, q in pairs], [b.leaf])


@pytest.mark.sweep(6)
@elsewhere
@all_ways
def test_rows_elsewhere(layout, way):
    a, b = make(layout), make(layout, [1, 0], width=9)
    got = way(lambda x, y: torch.cat([x, y], a.batch_dim) * 1)(a.x, b.x)
    check_parts(a, got, [*a.rows, *b.rows], [b.leaf])


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


# ---- growing ---------------------------------------------------------------------------------------------------


@pytest.mark.sweep(4)
@pytest.mark.parametrize("places", PLACES)
@all_ways
def test_append(places, way):
    table = make_table(places)
    b, r, place = table.batch_dim, table.ragged_dim, row_dim(table)
    new = random(*(n for d, n in enumerate(table.leaf.shape) if d != r))
    got = way(lambda x, new: x.append(new) * 1)(table.x, new)
    pairs = zip(table.rows, new.unbind(b - (r < b)), strict=True)
    expected = [torch.cat([row, one.unsqueeze(place)], place) for row, one in pairs]
    check_parts(table, got, expected, [new])


def test_append_needs_room():
    x = PaddedTensor.from_tensors([torch.arange(3), torch.arange(1)])
    with pytest.raises(RuntimeError, match="fills the table"):
        x.append(torch.tensor([7, 7]))
    with pytest.raises(ValueError, match=r"one entry for each row, of shape \(2,\)"):
        x.append(torch.tensor([7]))
    wider = x.to_padded(multiple=4, at_least=4)
    assert [row.tolist() for row in wider.append(torch.tensor([7, 8])).to_tensors()] == [[0, 1, 2, 7], [0, 8]]


# Functions of a plain tensor and rows that take the plain tensor as it is.
BESIDE = {
    "cat": lambda p, x: torch.cat([p, x], 2),
    "cat, and more after it": lambda p, x: torch.cat([p * 2, x, p, x], -1),
    "stack": lambda p, x: torch.stack([x, p], 2),
    "dstack": lambda p, x: torch.dstack([p, x]),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("grad", [False, True])
@all_ways
@layouts
def test_the_gradient_of_a_plain_tensor_is_plain(layout, way, grad, name):
    """The entries of it that do not exist have a gradient of 0."""
    batch = make(layout)
    place = batch.x.ragged_dim
    p = torch.randn(batch.x.shape, requires_grad=True)
    way(lambda p, x: BESIDE[name](p, x).square().sum())(p, batch.x.detach().requires_grad_(grad)).backward()
    table, exists = p.detach().requires_grad_(), batch.x.mask()
    exists = exists.reshape([n if d in (0, place) else 1 for d, n in enumerate(p.shape)])
    dense = BESIDE[name](table, batch.x.detach().to_dense())
    exists = exists.unsqueeze(2) if name == "stack" else exists
    dense.square().mul(exists).sum().backward()
    assert type(p.grad) is torch.Tensor
    torch.testing.assert_close(p.grad, table.grad)
