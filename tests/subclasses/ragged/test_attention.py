"""The attention op against scaled_dot_product_attention on one row at a time."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor

from subclasses.ragged.attention import grouping
from subclasses.ragged.attention.row_attention import ragged_attention
from tests.subclasses.ragged.judge import check_leaves

HEADS, WIDTH = 2, 8
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


def make_inputs(q_lengths, k_lengths, gap=0, dtype=torch.float64):
    torch.manual_seed(0)
    totals = [sum(n) + gap * len(n) for n in (q_lengths, k_lengths, k_lengths)]
    return [torch.randn(HEADS, t, WIDTH, dtype=dtype, requires_grad=True) for t in totals]


def loop(q, k, v, q_lengths, k_lengths, causal, scale, gap=0) -> Tensor:  # noqa: PLR0913
    """Row by row; zeros for rows that attend to nothing and between rows."""
    starts = [make_offsets(n, gap).tolist() for n in (q_lengths, k_lengths)]
    out = torch.zeros_like(q)
    for a, b, n, m in zip(*starts, q_lengths, k_lengths, strict=False):
        if n and m:
            one = F.scaled_dot_product_attention(
                q[None, :, a : a + n],
                k[None, :, b : b + m],
                v[None, :, b : b + m],
                is_causal=causal,
                scale=scale,
            )
            out = out.index_copy(1, torch.arange(a, a + n), one[0])
    return out


def run(inputs, q_lengths, k_lengths, causal, scale, gap=0) -> Tensor:
    offsets = [make_offsets(n, gap) for n in (q_lengths, k_lengths)]
    sizes = [torch.tensor(n, dtype=torch.int64) if gap else None for n in (q_lengths, k_lengths)]
    return ragged_attention(*inputs, *offsets, *sizes, causal, scale)[0]


def check(q_lengths, k_lengths, causal, gap=0):
    inputs, arguments = make_inputs(q_lengths, k_lengths, gap), (q_lengths, k_lengths, causal, 0.3, gap)
    got, expected = run(inputs, *arguments), loop(*inputs, *arguments)
    check_leaves([got], [expected], inputs if expected.requires_grad else ())


# ---- against a loop --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gap", [0, 2], ids=["back to back", "holes"])
@pytest.mark.parametrize("case", CASES)
def test_equals_a_loop(case, gap, causal):
    q_lengths, k_lengths = CASES[case]
    check(q_lengths, q_lengths if k_lengths is None else k_lengths, causal, gap)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=8), st.booleans())
def test_any_lengths(rows, causal):
    check([n for n, _ in rows], [m for _, m in rows], causal)


def test_transposed_values_as_a_model_makes_them():
    lengths, qkv = [5, 3, 6], torch.randn(14, 3, HEADS, WIDTH)
    inputs = [x.transpose(0, 1) for x in qkv.unbind(1)]
    out = run(inputs, lengths, lengths, True, 0.3)
    torch.testing.assert_close(out, loop(*inputs, lengths, lengths, True, 0.3))
    assert out.transpose(0, 1).is_contiguous()  # joining the heads again is free


def check_that_a_row_of_nan_reaches_no_other_row(attend):
    inputs = make_inputs([4, 5, 5], [4, 5, 5])
    for x in inputs:
        x.data[:, 4:9] = float("nan")
    out = attend(inputs)
    rows = out[:, :4], out[:, 9:]
    assert all(row.isfinite().all() for row in rows)
    sum(row.sum() for row in rows).backward()
    assert all(x.grad[:, :4].isfinite().all() and x.grad[:, 9:].isfinite().all() for x in inputs)


def test_a_row_of_nan_reaches_no_other_row():
    check_that_a_row_of_nan_reaches_no_other_row(lambda inputs: run(inputs, [4, 5, 5], [4, 5, 5], True, 0.3))


def test_scores_far_apart():
    lengths = [6, 6]
    inputs = [x.detach().mul(60).requires_grad_() for x in make_inputs(lengths, lengths)]
    outs = run(inputs, lengths, lengths, True, 1.0), loop(*inputs, lengths, lengths, True, 1.0)
    grads = [torch.autograd.grad(out.sum(), inputs) for out in outs]
    torch.testing.assert_close(*grads, atol=1e-9, rtol=1e-7)


# ---- plans -----------------------------------------------------------------------------------------------------


def sizes_of(lengths: list[int]) -> grouping.Sizes:
    return grouping.Sizes(sum(lengths), sum(lengths), HEADS)


def test_rows_of_about_one_length_share_a_group():
    lengths = [100, 95, 90, 40, 38, 3]
    rows = grouping.Rows(make_offsets(lengths), None)
    made = grouping.make_plan(rows, rows, sizes_of(lengths), causal=True)
    assert [g.queries.count for g in made.groups] == [3, 2, 1]
    assert made.complete and all(g.key_mask is None for g in made.groups)


def test_a_plan_is_kept_until_the_offsets_change():
    rows = grouping.Rows(make_offsets([3, 4]), None)
    first = grouping.plan_for(rows, rows, sizes_of([3, 4]), True)
    assert grouping.plan_for(rows, rows, sizes_of([3, 4]), True) is first
    rows.offsets[1] = 4
    changed = grouping.plan_for(rows, rows, sizes_of([3, 4]), True)
    assert changed is not first and changed.groups[0].queries.width == 4


def test_plans_go_with_their_offsets():
    rows = grouping.Rows(make_offsets([3, 4]), None)
    before = len(grouping._plans)
    grouping.plan_for(rows, rows, sizes_of([3, 4]), True)
    assert len(grouping._plans) == before + 1
    del rows
    assert len(grouping._plans) == before


# ---- as an op --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_is_a_well_behaved_op():
    lengths = [3, 0, 5]
    q, k, v = make_inputs(lengths, lengths)
    offsets = make_offsets(lengths)
    torch.library.opcheck(
        ragged_attention, (q, k, v, offsets, offsets, None, None, True, 1 / math.sqrt(WIDTH))
    )


def test_a_second_derivative_is_refused():
    inputs = make_inputs([3], [3])
    out = run(inputs, [3], [3], True, 0.3)
    (grad,) = torch.autograd.grad(out.sum(), inputs[:1], create_graph=True)
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.autograd.grad(grad.sum(), inputs[1:2])
