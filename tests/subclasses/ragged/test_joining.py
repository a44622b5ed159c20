"""Joining rows and entries, on both layouts, with a loop over the rows as judge."""

from __future__ import annotations

import pytest
import torch

from subclasses.ragged import PaddedTensor
from tests.subclasses.ragged.judge import (
    LAYOUTS,
    PLACES,
    alike,
    check_parts,
    desugared,
    eager,
    judged,
    layouts,
    make,
    make_batch,
    make_table,
    pairs_of,
    random,
    refused,
    row_dim,
    two_ways,
    ways,
)

NOTHING = torch.tensor([])  # skipped as for dense tensors; a cache of transformers begins with it

test_entries_and_features_of_each_row = judged(
    {
        "entries": (
            lambda x: torch.cat([x, x * 2, x[:, :1]], 1),
            lambda row, _: torch.cat([row, row * 2, row[:1]]),
        ),
        "nothing, and rows": (lambda x: torch.cat([NOTHING, x]), lambda row, _: row),
        "entries, and nothing": (lambda x: torch.cat([x, NOTHING], 1), lambda row, _: row),
        "nothing, and features": (lambda x: torch.cat([NOTHING, x], -1), lambda row, _: row),
        "dense entries": (
            lambda x, first, many: torch.cat([first.expand(4, 1, 4), x, many], 1),
            lambda row, i, first, many: torch.cat([first[None], row, many[i]]),
            (4,),
            (4, 2, 4),
        ),
        "dense features": (
            lambda x, p: torch.cat([p[:, : x.shape[1]], x], 2),
            lambda row, i, p: torch.cat([p[i, : len(row)], row], 1),
            (4, 7, 2),
        ),
        "features": alike(lambda t: torch.cat([t, t * 2], -1)),
        "stacked": (
            lambda x: torch.stack([x, x * 2], 2, out=None),
            lambda row, _: torch.stack([row, row * 2], 1),
        ),
    },
    pairs_of(LAYOUTS, [eager, desugared]),
    sweep=3,
)


@pytest.mark.sweep(2)
@two_ways
@layouts
def test_dense_rows_before_and_after_rows(layout, way):
    batch, dense = make(layout), random(2, 6, 4)
    got = way(lambda x, p: torch.cat([p, x, p]) * 1)(batch.x, dense)
    check_parts(batch, got, [*dense, *batch.rows, *dense], [dense])


@pytest.mark.sweep(2)
@two_ways
@layouts
def test_rows_after_rows(layout, way):
    batch = make(layout)
    got = way(lambda x: torch.cat([x, x[1:, :2] * 2]))(batch.x)
    check_parts(batch, got, [*batch.rows, *(row[:2] * 2 for row in batch.rows[1:])])


elsewhere = pytest.mark.parametrize("layout", [*PLACES, "ragged dim 2"])


@pytest.mark.sweep(8)
@elsewhere
@ways
def test_entries_elsewhere(layout, way):
    a, b = make(layout), make(layout, [1, 0, 0, 6], width=6)
    place = row_dim(a)
    got = way(lambda x, y: torch.cat([x, y, x * 2], a.ragged_dim) * 1)(a.x, b.x)
    pairs = zip(a.rows, b.rows, strict=True)
    check_parts(a, got, [torch.cat([p, q, p * 2], place) for p, q in pairs], [b.leaf])


@pytest.mark.sweep(6)
@elsewhere
@ways
def test_rows_elsewhere(layout, way):
    a, b = make(layout), make(layout, [1, 0], width=9)
    got = way(lambda x, y: torch.cat([x, y], a.batch_dim) * 1)(a.x, b.x)
    check_parts(a, got, [*a.rows, *b.rows], [b.leaf])


def test_batches_without_rows():
    x = make_batch(lengths=[]).x
    y = make_batch(lengths=[2, 0]).x
    assert torch.cat([x, y, x]).row_lengths().tolist() == [2, 0]
    assert torch.cat([x, x], 1).row_lengths().tolist() == []


OTHERS = r"do not join|into a new one|as many dimensions"
OUT = torch.zeros(())

test_what_is_refused = refused(
    {
        "other features": (lambda x: torch.cat([x, x[..., :2]]), NotImplementedError, OTHERS),
        "more dimensions": (lambda x: torch.cat([x, x.unsqueeze(-1)], 1), NotImplementedError, OTHERS),
        "dense rows": (lambda x: torch.cat([x, random(3, 2, 4)], 1), NotImplementedError, OTHERS),
        "a dense row": (lambda x: torch.cat([random(2, 4), x], 1), NotImplementedError, OTHERS),
        "cat into a tensor": (lambda x: torch.cat([x, x], -1, out=OUT), NotImplementedError, OTHERS),
        "stack into a tensor": (lambda x: torch.stack([x, x], -1, out=OUT), NotImplementedError, OTHERS),
    }
)


# ---- growing ---------------------------------------------------------------------------------------------------


@pytest.mark.sweep(4)
@pytest.mark.parametrize("places", PLACES)
@ways
def test_append(places, way):
    table = make_table(places)
    b, r, place = table.batch_dim, table.ragged_dim, row_dim(table)
    new = random(*(n for d, n in enumerate(table.leaf.shape) if d != r))
    got = way(lambda x, new: x.append(new) * 1)(table.x, new)
    pairs = zip(table.rows, new.unbind(b - (r < b)), strict=True)
    expected = [torch.cat([row, one.unsqueeze(place)], place) for row, one in pairs]
    check_parts(table, got, expected, [new])


@pytest.mark.parametrize(
    ("new", "error", "words"),
    [
        ([7, 7], RuntimeError, "fills the table"),
        ([7], ValueError, r"one entry for each row, of shape \(2,\)"),
    ],
)
def test_append_needs_room(new, error, words):
    x = PaddedTensor.from_tensors([torch.arange(3), torch.arange(1)])
    with pytest.raises(error, match=words):
        x.append(torch.tensor(new))
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
@ways
@layouts
def test_the_gradient_of_a_plain_tensor_is_plain(layout, way, grad, name):
    """The entries of it that do not exist have a gradient of 0."""
    batch = make(layout)
    p, table = (torch.ones(batch.x.shape).cumsum(2).requires_grad_() for _ in range(2))
    x, exists = batch.x.detach(), batch.x.mask().unsqueeze(-1)
    way(lambda p, x: BESIDE[name](p, x).square().sum())(p, x.clone().requires_grad_(grad)).backward()
    dense = BESIDE[name](table, x.to_dense()).square()
    dense.mul(exists.unsqueeze(-1) if dense.dim() == 4 else exists).sum().backward()
    assert type(p.grad) is torch.Tensor
    torch.testing.assert_close(p.grad, table.grad)
