"""The attention ops on the CPU, with dropout and without, against a loop over the rows with the same mask."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from subclasses.ragged.attention import grouping, row_dropout
from subclasses.ragged.attention.row_attention import ragged_attention
from subclasses.ragged.attention.row_dropout import ragged_attention_dropout
from tests.subclasses.ragged.judge import check_leaves

HEADS, WIDTH, SCALE, SEED = 2, 8, 0.3, torch.tensor(5)
CASES = {
    "about equal": ([9, 9, 8, 10], None),
    "very uneven": ([1, 40, 3, 0, 17, 40, 2], None),
    "long": ([400, 5, 380], None),
    "cross": ([3, 7, 0, 5, 4], [6, 2, 4, 0, 4]),
    "no rows": ([], []),
    "only empty rows": ([0, 0], None),
}


def make_offsets(lengths: list[int], gap: int = 0) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0) + gap * torch.arange(len(lengths) + 1)


def make(q_lengths, k_lengths=None, gap=0, dtype=torch.float64):
    """Queries, keys and values, and where their rows lie; there is a gap after each row."""
    torch.manual_seed(0)
    q_and_k = q_lengths, q_lengths if k_lengths is None else k_lengths
    totals = [sum(n) + gap * len(n) for n in (*q_and_k, q_and_k[1])]
    inputs = [torch.randn(HEADS, t, WIDTH, dtype=dtype, requires_grad=True) for t in totals]
    offsets = [make_offsets(n, gap) for n in q_and_k]
    return inputs, (*offsets, *[torch.tensor(n, dtype=torch.int64) if gap else None for n in q_and_k])


def attend(inputs, rows, causal=False, scale=SCALE):
    return ragged_attention(*inputs, *rows, causal, scale)[0]


def drop(inputs, rows, causal=False, p=0.3, seed=SEED):
    return ragged_attention_dropout(*inputs, seed, *rows, causal, SCALE, p)


def lengths_of(rows):
    return [
        (offsets.diff() if n is None else n).tolist() for offsets, n in zip(rows[:2], rows[2:], strict=True)
    ]


def weights_of(inputs, rows, *options):
    """The weights of a call with dropout, 0 where they were dropped: values are 1 at the place of each key."""
    lengths = lengths_of(rows)[1]
    places = inputs[2].new_zeros(*inputs[2].shape[:2], max([*lengths, 1]))
    for start, n in zip(rows[1].tolist(), lengths, strict=False):
        places[:, start : start + n, :n] = torch.eye(n)
    return drop((*inputs[:2], places), rows, *options)


def loop(inputs, rows, causal=False, scale=SCALE, weights=None, p=0.0) -> Tensor:
    """Row by row, with the probabilities that dropout kept; zeros for rows without keys, and between rows."""
    q, k, v = inputs
    out, kept = torch.zeros_like(q), 1 - round(p * 65536) / 65536
    for a, b, n, m in zip(*(o.tolist() for o in rows[:2]), *lengths_of(rows), strict=False):
        if n and m:
            scores = scale * q[:, a : a + n] @ k[:, b : b + m].mT
            if causal:
                scores = scores.masked_fill(torch.ones(n, m).triu(1).bool(), -math.inf)
            chosen = 1 if weights is None else weights[:, a : a + n, :m] != 0
            one = (scores.softmax(-1) * chosen / kept) @ v[:, b : b + m]
            out = out.index_copy(1, torch.arange(a, a + n), one)
    return out


def check(got, expected, inputs):
    check_leaves([got], [expected], inputs if expected.requires_grad else ())


# ---- against a loop --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gap", [0, 2], ids=["back to back", "holes"])
@pytest.mark.parametrize("case", CASES)
def test_equals_a_loop(case, gap, causal):
    inputs, rows = make(*CASES[case], gap)
    check(attend(inputs, rows, causal), loop(inputs, rows, causal), inputs)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=8), st.booleans())
def test_any_lengths(lengths, causal):
    inputs, rows = make([n for n, _ in lengths], [m for _, m in lengths])
    check(attend(inputs, rows, causal), loop(inputs, rows, causal), inputs)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gap", [0, 2], ids=["back to back", "holes"])
@pytest.mark.parametrize("case", CASES)
def test_dropout_equals_a_loop_with_the_same_mask(monkeypatch, case, gap, causal, p):
    if case != "long":  # several blocks of queries for short rows, too
        monkeypatch.setattr(row_dropout, "_BLOCK", 64)
        monkeypatch.setattr(row_dropout, "_QUERIES", 4)
    inputs, rows = make(*CASES[case], gap)
    weights, got = weights_of(inputs, rows, causal, p), drop(inputs, rows, causal, p)
    if p == 0:
        torch.testing.assert_close(got, attend(inputs, rows, causal))
    check(got, loop(inputs, rows, causal, weights=weights, p=p), inputs)


def test_transposed_values_as_a_model_makes_them():
    _, rows = make([5, 3, 6])
    inputs = [x.transpose(0, 1) for x in torch.randn(14, 3, HEADS, WIDTH).unbind(1)]
    out = attend(inputs, rows, True)
    torch.testing.assert_close(out, loop(inputs, rows, True))
    assert out.transpose(0, 1).is_contiguous()  # joining the heads again is free


@pytest.mark.parametrize("op", [attend, drop])
def test_a_row_of_nan_reaches_no_other_row(op):
    inputs, rows = make([4, 5, 5])
    for x in inputs:
        x.data[:, 4:9] = float("nan")
    out = op(inputs, rows, True)
    others = out[:, :4], out[:, 9:]
    assert all(row.isfinite().all() for row in others)
    sum(row.sum() for row in others).backward()
    assert all(x.grad[:, :4].isfinite().all() and x.grad[:, 9:].isfinite().all() for x in inputs)


def test_scores_far_apart():
    inputs, rows = make([6, 6])
    inputs = [x.detach().mul(60).requires_grad_() for x in inputs]
    grads = [torch.autograd.grad(f(inputs, rows, True, 1.0).sum(), inputs) for f in (attend, loop)]
    torch.testing.assert_close(*grads, atol=1e-9, rtol=1e-7)


# ---- dropout ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_a_share_of_the_weights_is_dropped_and_the_rest_scaled(p):
    whole, weights = (weights_of(*make([400, 90, 250]), False, q) for q in (0.0, p))
    exists, kept = whole > 0, weights != 0
    dropped = float((exists & ~kept).sum() / exists.sum())
    assert abs(dropped - p) < 5 * math.sqrt(p * (1 - p) / int(exists.sum()))
    factor = 65536 / (65536 - round(p * 65536))
    torch.testing.assert_close(weights[kept], whole[kept] * factor)
    torch.testing.assert_close(factor, 1 / (1 - p), rtol=1e-4, atol=0)


def test_masks_differ_by_seed_head_and_row():
    first, again, other = (weights_of(*make([64, 64]), False, 0.5, torch.tensor(s)) == 0 for s in (1, 1, 2))
    assert first.equal(again) and not first.equal(other)
    parts = [first[0, :64], first[1, :64], first[0, 64:], other[0, :64]]
    for a, b in itertools.combinations(parts, 2):
        assert abs((a == b).double().mean() - 0.5) < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision(dtype):
    inputs, rows = make([3, 7, 5, 200], dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    got, want = (drop(x, rows, True, 0.2) for x in (inputs, exact))
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), want, atol=2e-2, rtol=2e-2)
    grads = [torch.autograd.grad(o.cos().sum(), x) for o, x in ((got, inputs), (want, exact))]
    assert all(mine.dtype is dtype for mine in grads[0])
    torch.testing.assert_close(*grads, atol=5e-2, rtol=5e-2, check_dtype=False)


# ---- plans -----------------------------------------------------------------------------------------------------


def plan_for(rows, lengths, make_plan=grouping.plan_for):
    return make_plan(rows, rows, grouping.Sizes(sum(lengths), sum(lengths), HEADS), True)


def test_rows_of_about_one_length_share_a_group():
    lengths = [100, 95, 90, 40, 38, 3]
    made = plan_for(grouping.Rows(make_offsets(lengths), None), lengths, grouping.make_plan)
    assert [g.queries.count for g in made.groups] == [3, 2, 1]
    assert made.complete and all(g.key_mask is None for g in made.groups)


def test_a_plan_is_kept_until_the_offsets_change_or_go():
    rows, before = grouping.Rows(make_offsets([3, 4]), None), len(grouping._plans)
    first = plan_for(rows, [3, 4])
    assert plan_for(rows, [3, 4]) is first and len(grouping._plans) == before + 1
    rows.offsets[1] = 4
    changed = plan_for(rows, [3, 4])
    assert changed is not first and changed.groups[0].queries.width == 4
    del rows, first, changed
    assert len(grouping._plans) == before


# ---- as ops ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("op", [ragged_attention, ragged_attention_dropout])
def test_it_is_a_well_behaved_op(op):
    inputs, rows = make([3, 0, 5])
    more = [] if op is ragged_attention else [0.3]
    torch.library.opcheck(op, (*inputs, *[SEED] * len(more), *rows, True, SCALE, *more))


def test_a_second_derivative_is_refused():
    inputs, rows = make([3])
    (grad,) = torch.autograd.grad(attend(inputs, rows, True).sum(), inputs[:1], create_graph=True)
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.autograd.grad(grad.sum(), inputs[1:2])
