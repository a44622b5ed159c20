"""Dropout of attention over rows on the CPU: one mask for forward and backward, on the entries that exist."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import desugar
from subclasses.ragged import JaggedTensor, PaddedTensor
from subclasses.ragged.attention import row_dropout
from subclasses.ragged.attention.row_attention import ragged_attention
from subclasses.ragged.attention.row_dropout import ragged_attention_dropout
from tests.doors import DOORS
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
    at = places(rows[1], lengths[1], inputs[2])
    weights = ragged_attention_dropout(*inputs[:2], at, SEED, *rows, causal, SCALE, p)
    got = ragged_attention_dropout(*inputs, SEED, *rows, causal, SCALE, p)
    expected = attend_rows(inputs, weights, rows, lengths, causal, p)
    torch.testing.assert_close(got, expected)
    if p == 0:
        torch.testing.assert_close(got, ragged_attention(*inputs, *rows, causal, SCALE)[0])
    if expected.requires_grad:
        cotangent = torch.randn_like(expected)
        torch.testing.assert_close(
            torch.autograd.grad(got, inputs, cotangent),
            torch.autograd.grad(expected, inputs, cotangent, materialize_grads=True),
        )


def test_a_share_of_the_weights_is_dropped_and_the_rest_scaled():
    lengths = [400, 90, 250]
    inputs, rows = make_inputs(lengths, lengths), rows_at(lengths, lengths, 0)
    at = places(rows[1], lengths, inputs[2])
    whole = ragged_attention_dropout(*inputs[:2], at, SEED, *rows, False, SCALE, 0.0)
    for p in (0.001, 0.1, 0.5, 0.9):
        weights = ragged_attention_dropout(*inputs[:2], at, SEED, *rows, False, SCALE, p)
        exists = whole > 0
        count = int(exists.sum())
        dropped = int((exists & (weights == 0)).sum()) / count
        assert abs(dropped - p) < 5 * math.sqrt(p * (1 - p) / count)
        kept = weights != 0
        factor = 65536 / (65536 - round(p * 65536))
        torch.testing.assert_close(weights[kept], whole[kept] * factor)
        torch.testing.assert_close(factor, 1 / (1 - p), rtol=1e-4, atol=0)


def test_masks_differ_by_seed_head_and_row():
    lengths = [64, 64]
    inputs, rows = make_inputs(lengths, lengths), rows_at(lengths, lengths, 0)
    at = places(rows[1], lengths, inputs[2])
    first, again, other = (
        ragged_attention_dropout(*inputs[:2], at, torch.tensor(s), *rows, False, SCALE, 0.5) == 0
        for s in (1, 1, 2)
    )
    assert first.equal(again) and not first.equal(other)
    parts = [first[0, :64], first[1, :64], first[0, 64:], other[0, :64]]
    for i, a in enumerate(parts):
        for b in parts[:i]:
            assert abs((a == b).double().mean() - 0.5) < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision(dtype):
    lengths = [3, 7, 5, 200]
    inputs, rows = make_inputs(lengths, lengths, dtype=dtype), rows_at(lengths, lengths, 0)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    got, want = (ragged_attention_dropout(*x, SEED, *rows, True, SCALE, 0.2) for x in (inputs, exact))
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), want, atol=2e-2, rtol=2e-2)
    cotangent = torch.randn_like(want)
    grads = [torch.autograd.grad(o, x, cotangent.to(o.dtype)) for o, x in ((got, inputs), (want, exact))]
    assert all(mine.dtype is dtype for mine in grads[0])
    torch.testing.assert_close(*grads, atol=5e-2, rtol=5e-2, check_dtype=False)


def test_a_row_of_nan_reaches_no_other_row():
    rows = rows_at([4, 5, 5], [4, 5, 5], 0)
    check_that_a_row_of_nan_reaches_no_other_row(
        lambda inputs: ragged_attention_dropout(*inputs, SEED, *rows, True, SCALE, 0.3)
    )


@pytest.mark.slow
def test_it_is_a_well_behaved_op():
    lengths = [3, 0, 5]
    rows = rows_at(lengths, lengths, 0)
    torch.library.opcheck(
        ragged_attention_dropout, (*make_inputs(lengths, lengths), SEED, *rows, True, SCALE, 0.3)
    )


# ---- the rule --------------------------------------------------------------------------------------------------


def make_rows(kind: str, lengths=(30, 0, 1, 45), features=8) -> tuple[Any, list[Tensor]]:
    torch.manual_seed(0)
    rows = [torch.randn(n, features, requires_grad=True) for n in lengths]
    return (JaggedTensor if kind == "jagged" else PaddedTensor).from_tensors(rows), rows


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
    state = torch.get_rng_state()
    attend(x, 0.0)
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


def test_evaluation_draws_nothing():
    x, _ = make_rows("jagged")
    layer = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True).eval()
    state = torch.get_rng_state()
    layer(x, x, x, need_weights=False)
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize("kind", ["jagged", "padded"])
def test_the_mean_of_many_draws_is_the_attention_without_dropout(kind):
    x, _ = make_rows(kind, (3, 2))
    torch.manual_seed(0)
    with torch.no_grad():
        mean = sum(torch.cat(attend(x, 0.3).to_tensors()) for _ in range(500)) / 500
        torch.testing.assert_close(mean, torch.cat(attend(x, 0.0).to_tensors()), atol=0.15, rtol=0.1)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("door", DOORS)
def test_forward_and_backward_use_one_mask(door):
    """The gradient of a loss that is linear in the values is what the loss says of their size."""
    x, _ = make_rows("jagged")
    values = torch.randn(x.values.shape, requires_grad=True)

    def run(values: Tensor, x: Any) -> Any:
        h, v = heads(x), heads(x.with_values(values))
        return F.scaled_dot_product_attention(h, h, v, dropout_p=0.4)

    for _ in range(2):
        loss = DOORS[door](run)(values, x).values.sum()
        (grad,) = torch.autograd.grad(loss, values)
        torch.testing.assert_close((grad * values).sum(), loss)


def scaled(x: Any, scale: Tensor) -> Any:
    """Attention to values that a parameter scales, in which the result is linear."""
    h = heads(x)
    return F.scaled_dot_product_attention(h, h, h * scale, dropout_p=0.4).transpose(1, 2)


@pytest.mark.sweep(9)
@pytest.mark.parametrize("is_reentrant", [False, True], ids=["saved tensors", "reentrant"])
@pytest.mark.parametrize("door", DOORS)
def test_a_checkpoint_draws_the_same_again(door, is_reentrant):
    x, _ = make_rows("jagged")
    scale = torch.tensor(1.0, requires_grad=True)
    run = DOORS[door](lambda x, scale: checkpoint(scaled, x, scale, use_reentrant=is_reentrant))
    loss = run(x, scale).values.sum()
    loss.backward()
    torch.testing.assert_close(scale.grad, loss.detach())


@pytest.mark.slow
@pytest.mark.parametrize("compile", [torch.compile, desugar.compile], ids=["stock", "direct"])
def test_by_kernels(compile):
    x, _ = make_rows("jagged")
    scale, compiled = torch.tensor(1.0, requires_grad=True), compile(scaled)
    losses = [compiled(x, scale).values.sum() for _ in range(2)]
    for loss in losses:
        torch.testing.assert_close(torch.autograd.grad(loss, scale)[0], loss.detach())
    assert losses[0] != losses[1]
