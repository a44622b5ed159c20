"""Ops within entries and ops made of a few others, on both layouts, with a loop over the rows as judge."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from subclasses.ragged import PaddedTensor
from tests.subclasses.ragged.judge import (
    LAYOUTS,
    alike,
    desugared,
    eager,
    judged,
    layouts,
    make,
    pairs_of,
    refused,
    two_ways,
)

PAIRS = pairs_of(LAYOUTS, [eager, desugared])
B = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)


def turned(t):
    """Pairs of features turned by an angle, as rotary embeddings do it with complex numbers."""
    pairs = torch.view_as_complex(t.unflatten(-1, (2, 2)))
    return torch.view_as_real(pairs * (1 + 2j)).flatten(-2)


WITHIN = {
    "glu": (F.glu, F.glu),
    "pad": (lambda x: F.pad(x, (1, 2)), lambda row: F.pad(row, (1, 2))),
    "pad of nothing": (lambda x: F.pad(x, (1, 0, 0, 0, 0, 0)), lambda row: F.pad(row, (1, 0))),
    "flip": (lambda x: x.flip(-1), lambda row: row.flip(-1)),
    "roll": (lambda x: x.roll(1, 2), lambda row: row.roll(1, 1)),
    "flip of rows": (lambda x: x.flip(1, -1), lambda row: row.flip(0, 1)),
    "roll of rows": (lambda x: x.roll(2, 1), lambda row: row.roll(2, 0)),
    "roll back": (lambda x: x.roll((-4, 1), (1, 2)), lambda row: row.roll((-4, 1), (0, 1))),
    "pad of rows": (lambda x: F.pad(x, (1, 0, 2, 1), value=3), lambda row: F.pad(row, (1, 0, 2, 1), value=3)),
    "pad behind": (lambda x: F.pad(x, (0, 0, 0, 2)), lambda row: F.pad(row, (0, 0, 0, 2))),
    "diff": (lambda x: x.diff(), lambda row: row.diff()),
    "diff of rows": (lambda x: x.diff(dim=1), lambda row: row[1:] - row[:-1]),
    "hstack": (lambda x: torch.hstack([x, x * 2]), lambda row: torch.cat([row, row * 2])),
    "complex numbers": (turned, turned),
}


CROPS = {
    f"crop {pad}": alike(lambda t, pad=pad: F.pad(t, (0, 0, *pad))) for pad in [(-1, 0), (0, -1), (-1, 2)]
}

test_within_entries = judged(
    {name: (f, lambda row, _, g=g: g(row)) for name, (f, g) in WITHIN.items()}, PAIRS, sweep=48
)
test_rows_that_are_cropped = judged(CROPS, PAIRS, sweep=12, lengths=[3, 1, 5])
test_rows_that_are_too_short_to_crop = refused(
    {name: (f, RuntimeError, "fewer than the 1 entries") for name, (f, _) in CROPS.items()}
)


def test_rows_that_the_batch_has_not_need_nothing_to_crop():
    rows = [torch.randn(n, 4) for n in (3, 1, 2)]
    x = PaddedTensor.from_tensors(rows, batch_multiple=4)
    for pad in ((0, 0, -1, 0), (0, 0, 2, 1)):
        got = F.pad(x, pad)
        assert got.sum(1).to_tensors()[0].shape == (3, 4) and got.shape[0] == 4
        torch.testing.assert_close(got.to_tensors(), [F.pad(row, pad) for row in rows])


OF_TWO = {
    "complex": lambda x, b: torch.view_as_real(torch.complex(x, x * b) * torch.complex(x, x)),
    "polar": lambda x, b: torch.view_as_real(torch.polar(x.abs() + 1, x * b)),
    "pairwise_distance": lambda x, b: F.pairwise_distance(x, b),
    "cosine_similarity": lambda x, b: F.cosine_similarity(x, x * x + b, -1),
    "linalg.vecdot": lambda x, b: torch.linalg.vecdot(x, x * b),
    "linalg.norm": lambda x, b: torch.linalg.norm(x + b, dim=-1),
}


ALONG_ROWS = {
    "least": (lambda x: torch.aminmax(x, dim=1).min, lambda row, _: torch.aminmax(row, dim=0).min),
    "greatest": (
        lambda x: torch.aminmax(x, dim=2, keepdim=True).max,
        lambda row, _: torch.aminmax(row, dim=1, keepdim=True).max,
    ),
    "cosine_similarity": (
        lambda x, b: F.cosine_similarity(x, x * x + b, 1),
        lambda row, _, b: F.cosine_similarity(row, row * row + b, 0),
        B,
    ),
    "sum_to_size": (
        lambda x, b: (x + b).sum_to_size(len(x), 1, 4)[:, 0],
        lambda row, _, b: (row + b).sum(0),
        B,
    ),
    "addmm": (
        lambda x, b, w: torch.addmm(b, x.flatten(0, 1), w, beta=2, alpha=3).unflatten(0, x.shape[:2]),
        lambda row, _, b, w: torch.addmm(b, row, w, beta=2, alpha=3),
        (6,),
        (4, 6),
    ),
}

test_distances = judged({name: (*alike(f), B) for name, f in OF_TWO.items()}, PAIRS, sweep=24)
test_along_the_rows = judged(ALONG_ROWS, lengths=[3, 5, 1])
test_the_least_and_the_greatest_of_all = judged(
    {name: (lambda t, n=n: torch.aminmax(t)[n],) * 2 for n, name in enumerate(("least", "greatest"))},
    whole=True,
)


@pytest.mark.sweep(2)
@two_ways
@layouts
def test_random_numbers_in_place(layout, way):
    x = make(layout).x.detach()
    for draw in (
        lambda t: t.normal_(5, 0.1),
        lambda t: t.uniform_(4, 6),
        lambda t: t.exponential_() + 1,
        lambda t: F.gumbel_softmax(t) + 1,
    ):
        got = way(lambda x, draw=draw: draw(x * 1))(x)
        assert all(bool((row >= 1).all()) and len(row.unique()) > 1 for row in got.to_tensors() if len(row))
    x[:, 1:].normal_(100)
    assert all(bool((row[:1] < 50).all()) and bool((row[1:] > 50).all()) for row in x.to_tensors())


LOSSES = {
    "margin_ranking": lambda x, how: F.margin_ranking_loss(x, x * x, x.detach().sign(), 0.1, reduction=how),
    "triplet_margin": lambda x, how: F.triplet_margin_loss(x, x * 2, x + B, swap=True, reduction=how),
    "multilabel_soft_margin": lambda x, how: F.multilabel_soft_margin_loss(
        x, (x.detach() > 0).double(), B.detach(), reduction=how
    ),
    "binary_cross_entropy": lambda x, how: F.binary_cross_entropy(
        x.sigmoid(), (x.detach() > 0).double(), reduction=how
    ),
}


def cosine(x):
    return F.cosine_embedding_loss(x, x * x, x.detach().sum(-1).sign(), 0.1, reduction="none")


def multilabel(x):
    return F.multilabel_soft_margin_loss(x, (x.detach() > 0).double(), reduction="none")


test_losses = judged(
    {name: alike(lambda t, f=f: f(t, "none")) for name, f in LOSSES.items()} | {"cosine": alike(cosine)}
)
test_means_of_losses = judged(
    {name: (lambda t, f=f: f(t, "mean"),) * 2 for name, f in LOSSES.items()}, whole=True
)
# The mean over classes that are places of a row is one over what exists.
test_classes_that_are_places = judged(
    {"multilabel": (multilabel, lambda row, _: multilabel(row[None])[0])}, lengths=[3, 5, 1], entry=()
)

# ---- refused ---------------------------------------------------------------------------------------------------


@layouts
def test_a_sum_inside_another_op_is_no_silent_error(layout):
    """Its derivative below the rules would count the padding."""
    x = make(layout).x
    with pytest.raises(NotImplementedError, match="gradient would count entries"):
        torch.trapz(x + B, dim=-1)
    with torch.no_grad():
        got = torch.trapz(x + B, dim=-1)
    expected = [torch.trapz(row + B, dim=-1) for row in x.to_tensors()]
    torch.testing.assert_close(got.to_tensors(), [t.detach() for t in expected])


ALONG = r"ragged along|ragged one|stays|vector norm"
NO_OUT = "not written to an out="
OUT = torch.zeros(0, dtype=torch.float64)

test_what_is_refused = refused(
    {
        "unfold": (lambda x: x.unfold(0, 2, 1), NotImplementedError, ALONG),
        "pad of the batch": (lambda x: F.pad(x, (0, 0, 0, 0, 0, 1)), NotImplementedError, ALONG),
        "reflection": (lambda x: F.pad(x, (0, 1), mode="reflect"), NotImplementedError, ALONG),
        "roll of all": (lambda x: x.roll(1), NotImplementedError, ALONG),
        "flip of merged rows": (lambda x: x.flatten(0, 1).flip(0), NotImplementedError, ALONG),
        "glu of rows": (lambda x: F.glu(x, 1), NotImplementedError, ALONG),
        "nuclear norm": (lambda x: torch.linalg.norm(x, "nuc", (1, 2)), NotImplementedError, ALONG),
        "sum_to_size": (lambda x: x.sum_to_size(3, 4), ValueError, "is no expansion of"),
    }
)
# A dense tensor that is written to would get the size of what is stored.
test_no_dense_tensor_is_written_to = refused(
    {
        "amax": (lambda x: torch.amax(x, -1, out=OUT), NotImplementedError, NO_OUT),
        "max": (lambda x: torch.max(x, 1, out=(OUT, OUT.long())), NotImplementedError, NO_OUT),
        "logsumexp": (lambda x: torch.logsumexp(x, 1, out=OUT), NotImplementedError, NO_OUT),
        "cumsum": (lambda x: torch.cumsum(x, 1, out=OUT), NotImplementedError, NO_OUT),
        "softmax": (lambda x: torch.softmax(x, -1, out=OUT), NotImplementedError, NO_OUT),
        "gather": (lambda x: torch.gather(x, -1, x.argsort(-1), out=OUT), NotImplementedError, NO_OUT),
    },
    lengths=[3, 1],
)
