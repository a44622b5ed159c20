"""Ops within entries and ops made of a few others, on both layouts, with a loop over the rows as judge."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from subclasses.ragged import PaddedTensor
from tests.subclasses.ragged.both import LAYOUTS, judge_rows, make
from tests.subclasses.ragged.judge import desugared, eager

ways = pytest.mark.parametrize("way", [eager, desugared], ids=lambda w: w.__name__)
layouts = pytest.mark.parametrize("layout", LAYOUTS)

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


@pytest.mark.sweep(48)
@ways
@layouts
@pytest.mark.parametrize("name", WITHIN)
def test_within_entries(name, layout, way):
    on_ragged, on_row = WITHIN[name]
    judge_rows(layout, on_ragged, lambda row, _: on_row(row), way=way)


@pytest.mark.sweep(12)
@ways
@layouts
@pytest.mark.parametrize("pair", [(-1, 0), (0, -1), (-1, 2)], ids=str)
def test_rows_that_are_cropped(pair, layout, way):
    pad = (0, 0, *pair)
    judge_rows(layout, lambda x: F.pad(x, pad), lambda row, _: F.pad(row, pad), lengths=[3, 1, 5], way=way)
    if way is eager:
        with pytest.raises(RuntimeError, match="fewer than the 1 entries"):
            F.pad(make(layout).x, pad)


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


@pytest.mark.sweep(24)
@ways
@layouts
@pytest.mark.parametrize("name", OF_TWO)
def test_distances(name, layout, way):
    f = OF_TWO[name]
    judge_rows(layout, f, lambda row, _, b: f(row, b), [B], way=way)


@layouts
def test_the_least_and_the_greatest(layout):
    for dim, keepdim in ((1, False), (2, True)):
        judge_rows(
            layout,
            lambda x, d=dim, k=keepdim: torch.aminmax(x, dim=d, keepdim=k).max,
            lambda row, _, d=dim, k=keepdim: torch.aminmax(row, dim=d - 1, keepdim=k).max,
            lengths=[3, 5, 1],
        )
    batch = make(layout)
    torch.testing.assert_close(list(torch.aminmax(batch.x)), list(torch.aminmax(torch.cat(batch.rows))))


@pytest.mark.sweep(2)
@ways
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


@layouts
def test_along_the_rows(layout):
    lengths = [3, 5, 1]
    judge_rows(
        layout,
        lambda x, b: F.cosine_similarity(x, x * x + b, 1),
        lambda row, _, b: F.cosine_similarity(row, row * row + b, 0),
        [B],
        lengths,
    )
    judge_rows(
        layout,
        lambda x, b: (x + b).sum_to_size(len(x), 1, 4)[:, 0],
        lambda row, _, b: (row + b).sum(0),
        [B],
    )


@layouts
def test_addmm(layout):
    weight = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
    judge_rows(
        layout,
        lambda x, b, w: torch.addmm(b, x.flatten(0, 1), w, beta=2, alpha=3).unflatten(0, x.shape[:2]),
        lambda row, _, b, w: torch.addmm(b, row, w, beta=2, alpha=3),
        [bias, weight],
    )


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


@layouts
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, layout):
    f = LOSSES[name]
    judge_rows(layout, lambda x: f(x, "none"), lambda row, _: f(row, "none"))
    batch = make(layout)
    together = f(torch.cat(batch.rows), "mean")
    torch.testing.assert_close(f(batch.x, "mean"), together)
    grads = [torch.autograd.grad(t, batch.leaf)[0] for t in (f(batch.x, "mean"), together)]
    torch.testing.assert_close(*(g.nan_to_num(0) for g in grads))


@layouts
def test_cosine_embedding_loss(layout):
    def loss(x, sign, how):
        return F.cosine_embedding_loss(x, x * x, sign, 0.1, reduction=how)

    def signs(x):
        return x.detach().sum(-1).sign()

    judge_rows(layout, lambda x: loss(x, signs(x), "none"), lambda row, _: loss(row, signs(row), "none"))


@layouts
def test_classes_that_are_places_of_a_row(layout):
    """The mean over classes is one over what exists."""

    def loss(x):
        return F.multilabel_soft_margin_loss(x, (x.detach() > 0).double(), reduction="none")

    judge_rows(layout, loss, lambda row, _: loss(row[None])[0], lengths=[3, 5, 1], entry=())


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
REFUSED = {
    "unfold": (lambda x, layout: x.unfold(0, 2, 1), NotImplementedError, ALONG),
    "pad of the batch": (lambda x, layout: F.pad(x, (0, 0, 0, 0, 0, 1)), NotImplementedError, ALONG),
    "reflection": (lambda x, layout: F.pad(x, (0, 1), mode="reflect"), NotImplementedError, ALONG),
    "roll of all": (lambda x, layout: x.roll(1), NotImplementedError, ALONG),
    "flip of merged rows": (lambda x, layout: x.flatten(0, 1).flip(0), NotImplementedError, ALONG),
    "glu of rows": (lambda x, layout: F.glu(x, 1), NotImplementedError, ALONG),
    "nuclear norm": (lambda x, layout: torch.linalg.norm(x, "nuc", (1, 2)), NotImplementedError, ALONG),
    "sum_to_size": (lambda x, layout: x.sum_to_size(3, 4), ValueError, "is no expansion of"),
}


@layouts
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, layout):
    f, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        f(make(layout).x, layout)


WRITERS = {
    "amax": lambda x, o: torch.amax(x, -1, out=o),
    "max": lambda x, o: torch.max(x, 1, out=(o, o.long())),
    "logsumexp": lambda x, o: torch.logsumexp(x, 1, out=o),
    "cumsum": lambda x, o: torch.cumsum(x, 1, out=o),
    "softmax": lambda x, o: torch.softmax(x, -1, out=o),
    "gather": lambda x, o: torch.gather(x, -1, x.argsort(-1), out=o),
}


@layouts
@pytest.mark.parametrize("name", WRITERS)
def test_no_dense_tensor_is_written_to(name, layout):
    """It would get the size of what is stored."""
    x, out = make(layout, [3, 1]).x.detach(), torch.zeros(0, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="not written to an out="):
        WRITERS[name](x, out)
    assert out.numel() == 0
