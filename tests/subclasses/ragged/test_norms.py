"""Normalisations of channels and bags of embeddings, on both layouts, with a loop over the rows as judge."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from subclasses import DispatchError
from tests.subclasses.ragged.judge import (
    LAYOUTS,
    WAYS,
    desugared,
    eager,
    hold,
    judged,
    layouts,
    make,
    pairs_of,
    random,
    refused,
    stock,
    two_ways,
)

LENGTHS = [3, 2, 5, 4]
W, B = random(4), random(4)

NORMS = {
    "group_norm": lambda x, w, b: F.group_norm(x, 2, w, b),
    "one group": lambda x, w, b: F.group_norm(x, 1),
    "instance_norm": lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
}
MERGED = {
    "batch_norm": lambda t, w, b: F.batch_norm(t, None, None, w, b, training=True),
    "group_norm": lambda t, w, b: F.group_norm(t, 2, w, b),
}

test_of_each_row = judged(
    {
        name: (
            lambda x, w, b, f=f: f(x.transpose(1, 2), w, b).transpose(1, 2),
            lambda row, _, w, b, f=f: f(row.mT[None], w, b)[0].mT,
            *(W, B),
        )
        for name, f in NORMS.items()
    },
    pairs_of(LAYOUTS, [eager, desugared]),
    sweep=18,
    lengths=LENGTHS,
)
test_merged_dimensions = judged(
    {
        name: (
            lambda x, w, b, f=f: f(x.flatten(0, 1), w, b).square().sum(0),
            lambda entries, w, b, f=f: f(entries, w, b).square().sum(0),
            *(W, B),
        )
        for name, f in MERGED.items()
    },
    lengths=LENGTHS,
    whole=True,
)


@layouts
def test_an_empty_row_makes_nothing_nan(layout):
    batch = make(layout, [3, 0, 2])
    got = F.group_norm(batch.x.transpose(1, 2), 2, W, B)
    of_leaf, *others = torch.autograd.grad(got.sum(), [batch.leaf, W, B])
    assert not any(g.isnan().any() for g in (torch.where(batch.leaf.isnan(), 0, of_leaf), *others))


@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    ("layout", "way"), [pair for pair in pairs_of(LAYOUTS, WAYS) if pair != ("padded", stock)]
)
def test_batch_norm(layout, way):
    batch, ours, theirs = make(layout, LENGTHS), *(torch.nn.BatchNorm1d(4).double() for _ in range(2))
    torch.nn.init.normal_(ours.weight)
    theirs.load_state_dict(ours.state_dict())
    compiled = way(ours)
    for training in (True, False):
        ours.train(training), theirs.train(training)
        got, together = compiled(batch.x.transpose(1, 2)).transpose(1, 2), theirs(torch.cat(batch.rows))
        torch.testing.assert_close(got.to_tensors(), list(together.split(LENGTHS)))
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
        grads = [torch.autograd.grad(t.square().sum(), batch.leaf)[0] for t in (got, together)]
        torch.testing.assert_close(*(g.nan_to_num(0) for g in grads))


@layouts
def test_half_precision(layout):
    x = make(layout, LENGTHS).x.detach().to(torch.bfloat16).transpose(1, 2)
    expected = [F.group_norm(row[None], 2)[0] for row in x.to_tensors()]
    torch.testing.assert_close(F.group_norm(x, 2).to_tensors(), expected)


TURN = r"transpose\(1, 2\)|each row of which is a bag"
STATISTICS = torch.zeros(4), torch.ones(4)

test_what_is_refused = refused(
    {
        "group_norm": (lambda x: F.group_norm(x, 1), DispatchError, TURN),
        "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), DispatchError, TURN),
        "instance_norm": (lambda x: F.instance_norm(x), DispatchError, TURN),
        "embedding_bag": (lambda x: F.embedding_bag(x.long(), torch.ones(3, 2)), DispatchError, TURN),
        "groups": (
            lambda x: F.group_norm(x.transpose(1, 2), 3),
            RuntimeError,
            "do not make 3 groups",
        ),
        "statistics": (
            lambda x: F.instance_norm(x.transpose(1, 2), *STATISTICS),
            DispatchError,
            "their own mean",
        ),
        "weights of samples of a mean": (
            lambda x: F.embedding_bag(
                x.to_tensors() and x[..., 0].nan_to_num().long(),
                random(9, 3),
                mode="mean",
                per_sample_weights=x[..., 0],
            ),
            DispatchError,
            "go with mode='sum'",
        ),
    },
    lengths=LENGTHS,
)


# ---- bags ------------------------------------------------------------------------------------------------------

ROWS = [torch.tensor(row, dtype=torch.int64) for row in ([1, 2, 2], [], [8, 8], [2, 0, 5])]


@pytest.mark.sweep(12)
@two_ways
@layouts
@pytest.mark.parametrize(
    ("mode", "padding_idx", "weighted"),
    [
        *((mode, index, False) for mode in ("sum", "mean", "max") for index in (None, 2, -1)),
        ("sum", None, True),
    ],
)
def test_embedding_bag(layout, mode, padding_idx, weighted, way):
    table = random(9, 3)

    def bags(x, table, *offsets):
        weights = x.double() * 0.5 + 1 if weighted else None
        options = {"mode": mode, "padding_idx": padding_idx, "per_sample_weights": weights}
        return F.embedding_bag(x, table, *offsets, **options)

    got = way(bags)(hold(layout, ROWS), table)
    expected = torch.cat([bags(row, table, torch.zeros(1, dtype=torch.int64)) for row in ROWS])
    torch.testing.assert_close(got, expected)
    cotangent = torch.randn_like(got)
    torch.testing.assert_close(*(torch.autograd.grad(t, table, cotangent)[0] for t in (got, expected)))
