"""Normalisations of channels and bags of embeddings, on both layouts, with a loop over the rows as judge."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.subclasses.ragged.both import LAYOUTS, hold, judge_rows, make
from tests.subclasses.ragged.judge import desugared, eager, stock

LENGTHS = [3, 2, 5, 4]
layouts = pytest.mark.parametrize("layout", LAYOUTS)
ways = pytest.mark.parametrize("way", [eager, desugared], ids=lambda w: w.__name__)

W, B = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))

NORMS = {
    "group_norm": lambda x, w, b: F.group_norm(x, 2, w, b),
    "one group": lambda x, w, b: F.group_norm(x, 1),
    "instance_norm": lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
}


@pytest.mark.sweep(18)
@ways
@layouts
@pytest.mark.parametrize("name", NORMS)
def test_of_each_row(name, layout, way):
    f = NORMS[name]
    judge_rows(
        layout,
        lambda x, w, b: f(x.transpose(1, 2), w, b).transpose(1, 2),
        lambda row, _, w, b: f(row.mT[None], w, b)[0].mT,
        [W, B],
        LENGTHS,
        way=way,
    )


@layouts
def test_an_empty_row_makes_nothing_nan(layout):
    batch = make(layout, [3, 0, 2])
    got = F.group_norm(batch.x.transpose(1, 2), 2, W, B)
    grads = torch.autograd.grad(got.sum(), [batch.leaf, W, B])
    assert not any(torch.where(batch.leaf.isnan(), 0, g).isnan().any() for g in grads[:1])
    assert not any(g.isnan().any() for g in grads[1:])


@pytest.mark.sweep(5)
@pytest.mark.parametrize("way", [eager, desugared, stock], ids=lambda w: w.__name__)
@layouts
def test_batch_norm(layout, way):
    batch, ours, theirs = make(layout, LENGTHS), *(torch.nn.BatchNorm1d(4).double() for _ in range(2))
    if way is stock and layout == "padded":
        pytest.skip("judged by the other ways")
    compiled = way(ours) if way is not eager else ours
    for layer in (ours, theirs):
        torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
    for training in (True, False):
        ours.train(training), theirs.train(training)
        got = compiled(batch.x.transpose(1, 2)).transpose(1, 2)
        together = theirs(torch.cat(batch.rows))
        expected = together.split(LENGTHS)
        torch.testing.assert_close(got.to_tensors(), list(expected))
        torch.testing.assert_close(ours.running_mean, theirs.running_mean)
        torch.testing.assert_close(ours.running_var, theirs.running_var)
        grads = [torch.autograd.grad(t.square().sum(), batch.leaf)[0] for t in (got, together)]
        torch.testing.assert_close(*(g.nan_to_num(0) for g in grads))


@layouts
def test_merged_dimensions(layout):
    batch = make(layout, LENGTHS)
    together = torch.cat(batch.rows)
    merged = batch.x.flatten(0, 1)
    for f in (lambda t: F.batch_norm(t, None, None, W, B, training=True), lambda t: F.group_norm(t, 2, W, B)):
        parts = f(merged).unflatten(0, batch.x.shape[:2]).to_tensors()
        torch.testing.assert_close(parts, list(f(together).split(LENGTHS)))


@layouts
def test_half_precision(layout):
    x = make(layout, LENGTHS).x.detach().to(torch.bfloat16).transpose(1, 2)
    got = F.group_norm(x, 2)
    assert got.dtype == torch.bfloat16
    expected = [F.group_norm(row[None], 2)[0] for row in x.to_tensors()]
    torch.testing.assert_close(got.to_tensors(), expected)


TURN = r"transpose\(1, 2\)|each row of which is a bag"
REFUSED = {
    "group_norm": (lambda x, layout: F.group_norm(x, 1), NotImplementedError, TURN),
    "batch_norm": (lambda x, layout: F.batch_norm(x, None, None, training=True), NotImplementedError, TURN),
    "instance_norm": (lambda x, layout: F.instance_norm(x), NotImplementedError, TURN),
    "embedding_bag": (
        lambda x, layout: F.embedding_bag(x.long(), torch.ones(3, 2)),
        NotImplementedError,
        TURN,
    ),
    "groups": (lambda x, layout: F.group_norm(x.transpose(1, 2), 3), RuntimeError, "do not make 3 groups"),
    "statistics": (
        lambda x, layout: F.instance_norm(x.transpose(1, 2), torch.zeros(4), torch.ones(4)),
        NotImplementedError,
        "their own mean",
    ),
}


@layouts
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, layout):
    f, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        f(make(layout, LENGTHS).x, layout)


# ---- bags ------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(12)
@ways
@layouts
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 2, -1])
def test_embedding_bag(layout, mode, padding_idx, way):
    table = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    rows = [
        torch.tensor([1, 2, 2]),
        torch.tensor([], dtype=torch.int64),
        torch.tensor([8, 8]),
        torch.tensor([2, 0, 5]),
    ]
    x = hold(layout, rows)

    def bags(x, table, offsets=None):
        return F.embedding_bag(x, table, offsets, mode=mode, padding_idx=padding_idx)

    got = way(bags)(x, table)
    expected = torch.cat([bags(row, table, torch.zeros(1, dtype=torch.int64)) for row in rows])
    torch.testing.assert_close(got, expected)
    cotangent = torch.randn_like(got)
    torch.testing.assert_close(*(torch.autograd.grad(t, table, cotangent)[0] for t in (got, expected)))


@layouts
def test_weights_of_samples(layout):
    table = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    rows = [torch.tensor([1, 2, 2]), torch.tensor([8, 8])]
    x = hold(layout, rows)
    weights = x.double() * 0.5 + 1
    got = F.embedding_bag(x, table, mode="sum", per_sample_weights=weights)
    expected = [
        F.embedding_bag(row[None], table, mode="sum", per_sample_weights=(row.double() * 0.5 + 1)[None])[0]
        for row in rows
    ]
    torch.testing.assert_close(list(got), expected)
    with pytest.raises(NotImplementedError, match="go with mode='sum'"):
        F.embedding_bag(x, table, mode="mean", per_sample_weights=weights)
