"""Merged dimensions and padded batches: what exists is counted, and what merges unmerges to the same rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from subclasses import DispatchError
from subclasses.ragged import PaddedTensor
from tests.subclasses.ragged.judge import (
    WAYS,
    alike,
    judge_rows,
    judged,
    make_table,
    pairs_of,
    random,
    ways,
)

# ---- merging and unmerging -------------------------------------------------------------------------------------

MERGES = {  # of [4, 7, 6], and back
    "flatten": (lambda x: x.flatten(0, 1), lambda m: m.unflatten(0, (4, 7))),
    "view": (lambda x: x.view(-1, 6), lambda m: m.view(4, 7, 6)),
    "reshape": (lambda x: x.reshape(28, -1), lambda m: m.reshape(4, -1, 6)),
    "features too": (lambda x: x.view(-1, 2, 3), lambda m: m.view(4, 7, 2, 3).flatten(2)),
    "unflatten -1": (lambda x: x.flatten(0, 1), lambda m: m.unflatten(0, (-1, 7))),
    "a dimension in front": (lambda x: x.unsqueeze(0).flatten(1, 2), lambda m: m.unflatten(1, (4, 7)).squeeze(0)),
    "resized": (lambda x: x.flatten(0, 1).unflatten(1, (2, 3)).transpose(1, 2).flatten(1),
                lambda m: m.view(4, 7, 3, 2).transpose(2, 3).flatten(2)),
}  # fmt: skip


test_it_unmerges_to_the_same_rows = judged(
    {
        name: (lambda x, f=f, g=g: g(f(x).tanh()), lambda row, _: row.tanh())
        for name, (f, g) in MERGES.items()
    },
    pairs_of(["padded"], WAYS),
    sweep=12,
    entry=(6,),
)


@pytest.mark.parametrize("name", MERGES)
def test_a_merged_view_shares_lengths_and_memory(name):
    merge, unmerge = MERGES[name]
    x = make_table(entry=(6,)).x.detach()
    m = merge(x)
    assert m.merged and m.lengths is x.lengths and unmerge(m).shape == x.shape
    if name in ("flatten", "view", "features too"):
        assert m._is_view()
        m.zero_()
        assert all((row == 0).all() for row in x.to_tensors())


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 3, 1), (2, 1, 1), (2, 1, 4), (1, 3, 4), (3, 0, 2), (0, 3, 2)]
)
def test_small_extents(shape):
    b, t, d = shape
    x = PaddedTensor(torch.ones(shape), torch.full((b,), t))
    m = x.flatten(0, 1)
    assert m.merged and m.shape == (b * t, d) and m.unflatten(0, (b, t)).shape == shape
    if b:
        judge_rows(
            "padded", lambda x: x.flatten(0, 1) * 2, lambda row, _: row * 2, (), [t] * b, (d,), width=t
        )


MERGED_OPS = {  # of [N, 6], and of all entries as one plain tensor
    "sum": (lambda m: m.sum(0), lambda e: e.sum(0)),
    "mean": (lambda m: m.mean(0), lambda e: e.mean(0)),
    "mean of all": (lambda m: m.mean(), lambda e: e.mean()),
    "var": (lambda m: m.var(0), lambda e: e.var(0)),
    "std of all": (lambda m: m.std(), lambda e: e.std()),
    "amax": (lambda m: m.amax(0), lambda e: e.amax(0)),
    "logsumexp": (lambda m: m.logsumexp(0), lambda e: e.logsumexp(0)),
    "norm": (lambda m: torch.linalg.vector_norm(m), lambda e: torch.linalg.vector_norm(e)),
    "softmax": (lambda m: (m.softmax(0) * m).sum(0), lambda e: (e.softmax(0) * e).sum(0)),
    "cumsum": (lambda m: (m.cumsum(0) * m).sum(0), lambda e: (e.cumsum(0) * e).sum(0)),
    "product": (lambda m: m.mT @ m.tanh(), lambda e: e.mT @ e.tanh()),
    "mse": (lambda m: F.mse_loss(m, m.tanh()), lambda e: F.mse_loss(e, e.tanh())),
}


test_merged_entries_are_counted = judged(
    {name: (lambda x, f=f: f(x.flatten(0, 1)), g) for name, (f, g) in MERGED_OPS.items()},
    pairs_of(["holes", "padded"], WAYS),
    sweep=12,
    entry=(6,),
    whole=True,
)


def layers(t, w, b, g):
    m = F.linear(t.reshape(-1, 6), w, b) + t.reshape(-1, 6) @ w.mT
    return F.layer_norm(F.gelu(m), (5,), g, b).view(*t.shape[:-1], 5)


test_layers_of_merged_entries = judged(
    {"layers": (*alike(layers), (5, 6), (5,), (5,))}, pairs_of(["padded"], WAYS), sweep=3, entry=(6,)
)


def test_other_rows_do_not_mix():
    x, y = make_table(lengths=[3, 1]).x.flatten(0, 1), make_table(lengths=[1, 3]).x.flatten(0, 1)
    with pytest.raises(ValueError, match=r"\[3, 1\] and \[1, 3\]"):
        x + y
    wider = make_table(lengths=[3, 1], width=9)
    torch.testing.assert_close((x + wider.x.flatten(0, 1)).to_tensors()[1], x.to_tensors()[1] + wider.rows[1])


# ---- padded batches --------------------------------------------------------------------------------------------


def padded_batch(lengths=(3, 2, 5), multiple=4):
    """A table with a row that the batch has not, all padding NaN, and the plain rows."""
    rows = [random(n, 6) for n in lengths]
    x = PaddedTensor.from_tensors(rows, multiple=7, batch_multiple=multiple)
    return rows, x.with_padded(x.to_dense(fill=float("nan")))


PER_ROW = {
    "sum": lambda t, d: t.sum(d),
    "mean": lambda t, d: t.mean(d),
    "var": lambda t, d: t.var(d),
    "amax": lambda t, d: t.amax(d),
    "max": lambda t, d: t.max(d)[0],
    "logsumexp": lambda t, d: t.logsumexp(d),
    "norm": lambda t, d: torch.linalg.vector_norm(t, dim=d),
    "prod": lambda t, d: t.prod(d),
    "all of it": lambda t, d: t.sum((d, d + 1)),
    "last": lambda t, d: t.select(d, -1),
    "centred": lambda t, d: ((t - t.mean(d, keepdim=True)) * t).sum(d),
    "product": lambda t, d: t.mT @ t,
}


def check_batch(got, rows, expected):
    """Values, and gradients of the rows under a cotangent that is NaN where there is no row."""
    (entries,) = got.to_tensors()
    assert got.merged and got.shape[0] == 4 and entries.shape[0] == 3
    torch.testing.assert_close(entries, expected)
    cotangent = torch.full_like(got.padded, float("nan"))
    cotangent[:3] = weights = torch.randn_like(expected)
    ours = torch.autograd.grad(got, rows, got.detach().with_padded(cotangent))
    torch.testing.assert_close(ours, torch.autograd.grad(expected, rows, weights))


@pytest.mark.sweep(15)
@pytest.mark.parametrize("name", PER_ROW)
@ways
def test_a_reduction_keeps_the_batch(name, way):
    f = PER_ROW[name]
    rows, x = padded_batch()
    check_batch(way(lambda x: f(x, 1))(x), rows, torch.stack([f(row, 0) for row in rows]))


def classify(pooled, w):
    """Pooled entries go on: the mean over the batch divides by the rows that it has."""
    y = torch.tensor([0, 2, 1, 10**9])[: len(pooled)]
    pooled = F.layer_norm(pooled, (6,))
    return F.cross_entropy(F.linear(pooled, w), y) + pooled.square().mean() + pooled.softmax(0).amax()


@pytest.mark.sweep(3)
@ways
def test_a_classifier_over_a_padded_batch(way):
    rows, x = padded_batch()
    w = random(3, 6)
    got = way(lambda x, w: classify(x.tanh().mean(1), w))(x, w)
    expected = classify(torch.stack([row.tanh().mean(0) for row in rows]), w)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, [*rows, w]) for loss in (got, expected)))


def test_what_divides_by_the_batch():
    rows, x = padded_batch()
    p = x.detach().tanh().exp()
    total = sum(F.kl_div(row, row.detach().tanh().exp(), reduction="sum") for row in rows)
    for t, q, count in ((x, p, 3), (x.flatten(0, 1), p.flatten(0, 1), 10)):
        torch.testing.assert_close(F.kl_div(t, q, reduction="batchmean"), total / count)


def test_a_padded_batch_converts_and_cuts():
    rows, x = padded_batch()
    for same in (x.to_tensors(), list(x), x.to_jagged().to_tensors(), x.flatten(0, 1).to_tensors()):
        torch.testing.assert_close(same, rows)
    torch.testing.assert_close([x[1:].to_tensors(), x[:2].to_tensors()], [rows[1:], rows[:2]])
    assert x[3:].to_tensors() == [] and x.to(torch.float32).row_count is x.row_count
    longer = x.append(torch.ones(4, 6, dtype=torch.float64))
    assert longer.row_lengths().tolist() == [4, 3, 6, 0]
    plain = PaddedTensor.from_tensors([torch.ones(2), torch.ones(1)], batch_multiple=2)
    assert plain.shape == (2, 2) and plain.mean(1).mean() == 1


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: x[3], IndexError, "out of bounds for the 3 rows of the batch"),
        (lambda x: x[[0, 1]], DispatchError, "taken by slices"),
        (
            lambda x: PaddedTensor(x.padded, x.lengths, row_count=x.lengths[0]),
            ValueError,
            "row_count: expected shape",
        ),
    ],
)
def test_what_a_padded_batch_refuses(call, error, words):
    with pytest.raises(error, match=words):
        call(padded_batch()[1])


def test_a_dense_operand_beside_a_padded_batch():
    rows, x = padded_batch()
    per_row, everywhere = random(4, 1, 1), random(4, 7, 6)
    got = (x * per_row + everywhere).square().mean()
    expected = torch.cat(
        [row * per_row[i] + everywhere[i, : len(row)] for i, row in enumerate(rows)], 0
    ).square().mean()  # fmt: skip
    leaves = [*rows, per_row, everywhere]
    torch.testing.assert_close(torch.autograd.grad(got, leaves), torch.autograd.grad(expected, leaves))
