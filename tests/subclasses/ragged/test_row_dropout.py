"""Dropout of attention over rows on the CPU: one mask for forward and backward, on the entries that exist."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import desugar
from subclasses.ragged.attention import row_dropout
from subclasses.ragged.attention.row_attention import ragged_attention
from subclasses.ragged.attention.row_dropout import ragged_attention_dropout
from tests.doors import DOORS
from tests.subclasses.ragged.judge import KINDS, check_leaves
from tests.subclasses.ragged.test_attention import (
    CASES,
    check_that_a_row_of_nan_reaches_no_other_row,
    make_inputs,
    make_offsets,
)

SCALE, SEED = 0.3, torch.tensor(5)


def rows_at(q_lengths, k_lengths, gap):
    offsets = [make_offsets(n, gap) for n in (q_lengths, k_lengths)]
    return *offsets, *[torch.tensor(n, dtype=torch.int64) if gap else None for n in (q_lengths, k_lengths)]


def places(offsets: Tensor, lengths: list[int], like: Tensor) -> Tensor:
    """Values whose sums are the weights themselves: 1 at the place of each key in its row."""
    found = like.new_zeros(*like.shape[:2], max([*lengths, 1]))
    for start, n in zip(offsets.tolist(), lengths, strict=False):
        found[:, start : start + n, :n] = torch.eye(n)
    return found


def attend_rows(inputs, weights, rows, lengths, causal, p):
    """Row by row, with the probabilities that the op kept."""
    q, k, v = inputs
    out, kept = torch.zeros_like(q), 1 - round(p * 65536) / 65536
    for a, b, n, m in zip(*(o.tolist() for o in rows[:2]), *lengths, strict=False):
        if n and m:
            scores = SCALE * q[:, a : a + n] @ k[:, b : b + m].mT
            if causal:
                scores = scores.masked_fill(torch.ones(n, m).triu(1).bool(), -math.inf)
            chosen = weights[:, a : a + n, :m] != 0
            one = (scores.softmax(-1) * chosen / kept) @ v[:, b : b + m]
            out = out.index_copy(1, torch.arange(a, a + n), one)
    return out


def drop(inputs, rows, causal=False, p=0.3, seed=SEED):
    return ragged_attention_dropout(*inputs, seed, *rows, causal, SCALE, p)


def weights_of(inputs, rows, k_lengths, *options):
    """The weights of a call, which are 0 where they were dropped."""
    return drop((*inputs[:2], places(rows[1], k_lengths, inputs[2])), rows, *options)


def made(lengths, **options):
    """Inputs and rows of these lengths, back to back."""
    return make_inputs(lengths, lengths, **options), rows_at(lengths, lengths, 0)


# ---- the op ----------------------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gap", [0, 2], ids=["back to back", "holes"])
@pytest.mark.parametrize("case", CASES)
def test_equals_a_loop_with_the_same_mask(monkeypatch, case, gap, causal, p):
    if case != "long":  # several blocks of queries for short rows, too
        monkeypatch.setattr(row_dropout, "_BLOCK", 64)
        monkeypatch.setattr(row_dropout, "_QUERIES", 4)
    q_lengths, k_lengths = CASES[case]
    lengths = q_lengths, q_lengths if k_lengths is None else k_lengths
    inputs, rows = make_inputs(*lengths, gap), rows_at(*lengths, gap)
    weights, got = weights_of(inputs, rows, lengths[1], causal, p), drop(inputs, rows, causal, p)
    expected = attend_rows(inputs, weights, rows, lengths, causal, p)
    if p == 0:
        torch.testing.assert_close(got, ragged_attention(*inputs, *rows, causal, SCALE)[0])
    check_leaves([got], [expected], inputs if expected.requires_grad else ())


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_a_share_of_the_weights_is_dropped_and_the_rest_scaled(p):
    lengths = [400, 90, 250]
    inputs, rows = made(lengths)
    whole, weights = (weights_of(inputs, rows, lengths, False, q) for q in (0.0, p))
    exists, kept = whole > 0, weights != 0
    dropped = float((exists & ~kept).sum() / exists.sum())
    assert abs(dropped - p) < 5 * math.sqrt(p * (1 - p) / int(exists.sum()))
    factor = 65536 / (65536 - round(p * 65536))
    torch.testing.assert_close(weights[kept], whole[kept] * factor)
    torch.testing.assert_close(factor, 1 / (1 - p), rtol=1e-4, atol=0)


def test_masks_differ_by_seed_head_and_row():
    inputs, rows = made([64, 64])
    first, again, other = (
        weights_of(inputs, rows, [64, 64], False, 0.5, torch.tensor(s)) == 0 for s in (1, 1, 2)
    )
    assert first.equal(again) and not first.equal(other)
    parts = [first[0, :64], first[1, :64], first[0, 64:], other[0, :64]]
    for a, b in itertools.combinations(parts, 2):
        assert abs((a == b).double().mean() - 0.5) < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision(dtype):
    inputs, rows = made([3, 7, 5, 200], dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    got, want = (drop(x, rows, True, 0.2) for x in (inputs, exact))
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), want, atol=2e-2, rtol=2e-2)
    grads = [torch.autograd.grad(o.cos().sum(), x) for o, x in ((got, inputs), (want, exact))]
    assert all(mine.dtype is dtype for mine in grads[0])
    torch.testing.assert_close(*grads, atol=5e-2, rtol=5e-2, check_dtype=False)


def test_a_row_of_nan_reaches_no_other_row():
    rows = rows_at([4, 5, 5], [4, 5, 5], 0)
    check_that_a_row_of_nan_reaches_no_other_row(lambda inputs: drop(inputs, rows, True))


@pytest.mark.slow
def test_it_is_a_well_behaved_op():
    inputs, rows = made([3, 0, 5])
    torch.library.opcheck(ragged_attention_dropout, (*inputs, SEED, *rows, True, SCALE, 0.3))


# ---- the rule --------------------------------------------------------------------------------------------------


def make_rows(kind: str, lengths=(30, 0, 1, 45), features=8) -> tuple[Any, list[Tensor]]:
    torch.manual_seed(0)
    rows = [torch.randn(n, features, requires_grad=True) for n in lengths]
    return KINDS[kind](rows), rows


def heads(x: Any) -> Any:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def attend(x: Any, p: float = 0.4) -> Any:
    h = heads(x)
    return F.scaled_dot_product_attention(h, h, h, dropout_p=p, is_causal=True).transpose(1, 2).flatten(-2)


def results(f: Any, x: Any, rows: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(3)
    out = f(x)
    total = torch.cat(out.to_tensors()).square().sum()
    return [total.detach(), *torch.autograd.grad(total, rows)]


def test_a_seed_gives_the_same_result_again():
    x, rows = make_rows("jagged")
    torch.testing.assert_close(results(attend, x, rows), results(attend, x, rows), atol=0, rtol=0)
    assert not attend(x).values.equal(attend(x).values)


@pytest.mark.parametrize("kind", ["jagged", "padded"])
def test_all_or_nothing(kind):
    x, rows = make_rows(kind)
    assert all(not t.any() for t in results(lambda x: attend(x, 1.0), x, rows))
    layer = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True).eval()
    state = torch.get_rng_state()
    attend(x, 0.0)
    layer(x, x, x, need_weights=False)
    assert torch.get_rng_state().equal(state)  # nothing is drawn
    for p in (-0.1, 1.5):
        with pytest.raises(ValueError, match=f"between 0 and 1, got {p}"):
            attend(x, p)


@pytest.mark.parametrize("width", [2, 12])
def test_values_of_another_width(width):
    """Without dropout, and with dropout of almost nothing, as the same rows one by one."""
    x, rows = make_rows("jagged")
    for p in (0.0, 1e-9):
        h = heads(x)
        got = F.scaled_dot_product_attention(h, h, torch.cat([h, h, h], -1)[..., :width], dropout_p=p)
        for mine, row in zip(got.to_tensors(), rows, strict=True):
            q = heads(row[None]) if len(row) else row.new_zeros(1, 2, 0, 4)
            want = F.scaled_dot_product_attention(q, q, torch.cat([q, q, q], -1)[..., :width])[0]
            torch.testing.assert_close(mine, want)
    got.values.sum().backward()


@pytest.mark.parametrize("kind", ["jagged", "padded"])
def test_the_mean_of_many_draws_is_the_attention_without_dropout(kind):
    x, _ = make_rows(kind, (3, 2))
    torch.manual_seed(0)
    with torch.no_grad():
        mean = sum(torch.cat(attend(x, 0.3).to_tensors()) for _ in range(500)) / 500
        torch.testing.assert_close(mean, torch.cat(attend(x, 0.0).to_tensors()), atol=0.15, rtol=0.1)


def scaled(x: Any, scale: Tensor) -> Any:
    """Attention to values that a parameter scales, in which the result is linear."""
    h = heads(x)
    return F.scaled_dot_product_attention(h, h, h * scale, dropout_p=0.4).transpose(1, 2)


REGIONS = {
    "plain": scaled,
    "saved tensors": lambda *args: checkpoint(scaled, *args, use_reentrant=False),
    "reentrant": lambda *args: checkpoint(scaled, *args, use_reentrant=True),
}
KERNELS = {"stock": torch.compile, "direct": desugar.compile}


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("door", "region"),
    [
        *itertools.product(DOORS.values(), REGIONS),
        *(pytest.param(door, "plain", marks=pytest.mark.slow) for door in KERNELS.values()),
    ],
)
def test_forward_and_backward_use_one_mask(door, region):
    """The gradient of a loss that is linear in the values is what the loss says of their size."""
    x, _ = make_rows("jagged")
    scale, run = torch.tensor(1.0, requires_grad=True), door(REGIONS[region])
    losses = [run(x, scale).values.sum() for _ in range(2)]
    for loss in losses:
        scale.grad = None
        loss.backward()
        torch.testing.assert_close(scale.grad, loss.detach())
    assert losses[0] != losses[1]
