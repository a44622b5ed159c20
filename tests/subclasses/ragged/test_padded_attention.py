"""Attention of padded rows beyond the plain case: heads in groups, dropout, keys of other lengths, caches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from subclasses import DispatchError
from subclasses.ragged import PaddedTensor
from tests.subclasses.ragged.judge import stock
from tests.subclasses.ragged.padded_judge import WAYS, check_padded, check_parts, make_table

ways = pytest.mark.parametrize("way", [*WAYS, stock], ids=lambda w: w.__name__)
attend = F.scaled_dot_product_attention


def heads(x, count):
    """``[B, T, D]`` to ``[B, heads, T, D / heads]``; of a row without B."""
    return x.unflatten(-1, (count, -1)).transpose(-3, -2)


def together(x):
    return x.transpose(-3, -2).flatten(-2)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("causal", [False, True])
@ways
def test_heads_in_groups(causal, way):
    """Four heads of queries to two of keys and values."""

    def run(x, keys, values):
        q, k, v = heads(x, 4), heads(x @ keys, 2), heads(x @ values, 2)
        return together(attend(q, k, v, is_causal=causal, enable_gqa=True))

    parameters = [torch.randn(8, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def judge(row, _, keys, values):
        return run(row[None], keys, values)[0] if len(row) else row * 1

    check_padded(make_table(entry=(8,)), run, judge, parameters, way)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.5])
@ways
def test_keys_of_other_lengths(causal, scale, way):
    asked, given = make_table(entry=(8,)), make_table(lengths=[2, 3, 6, 4], width=6, entry=(8,))

    def run(q, k):
        return together(attend(heads(q, 2), heads(k, 2), heads(k * 2, 2), is_causal=causal, scale=scale))

    got = way(run)(asked.x, given.x)
    expected = [
        run(q[None], k[None])[0] if len(q) else q * 1 for q, k in zip(asked.rows, given.rows, strict=True)
    ]
    check_parts(asked, got, expected, [given.leaf])


def test_one_query_for_each_row_and_a_cache_of_keys():
    """A decoding step: the rows of the cache differ, the queries are one each."""
    cache, new = make_table(entry=(8,)), torch.randn(4, 8, dtype=torch.float64)
    keys = cache.x.detach().append(new)
    query = PaddedTensor(new[:, None], torch.ones(4, dtype=torch.int64))
    got = together(attend(heads(query, 2), heads(keys, 2), heads(keys, 2)))
    for mine, row, q in zip(got.to_tensors(), cache.rows, new, strict=True):
        k = heads(torch.cat([row.detach(), q[None]])[None], 2)
        torch.testing.assert_close(mine, together(attend(heads(q[None, None], 2), k, k))[0])


def test_dropout_of_scores():
    torch.manual_seed(0)
    table = make_table(lengths=[64, 0, 40], width=70, entry=(8,))
    ones = PaddedTensor(torch.ones_like(table.leaf), table.lengths)
    out = attend(*(heads(t, 2) for t in (table.x, table.x, ones)), dropout_p=0.5)
    for part in out.to_tensors():
        if part.numel():  # what is left of the weights adds up to one in the mean
            assert part.std() > 0 and abs(part.mean() - 1) < 0.1
    out.sum().backward()
    assert not table.leaf.grad.isnan().any()
    assert not any(part.any() for part in table.slices(table.leaf.grad)[1:2])


def test_a_padded_batch_attends():
    rows = [torch.randn(n, 8) for n in (3, 5)]
    x = PaddedTensor.from_tensors(rows, multiple=8, batch_multiple=4)
    x = x.with_padded(x.to_dense(fill=float("nan")))
    got = together(attend(heads(x, 2), heads(x, 2), heads(x, 2), is_causal=True))
    for mine, row in zip(got.to_tensors(), rows, strict=True):
        q = heads(row[None], 2)
        torch.testing.assert_close(mine, together(attend(q, q, q, is_causal=True))[0])
    assert got.row_count is x.row_count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    rows = [torch.randn(n, 8).to(dtype) for n in (3, 5)]
    x = PaddedTensor.from_tensors(rows, multiple=8)
    got = together(attend(heads(x, 2), heads(x, 2), heads(x, 2)))
    for mine, row in zip(got.to_tensors(), rows, strict=True):
        q = heads(row[None], 2)
        torch.testing.assert_close(mine, together(attend(q, q, q))[0], atol=2e-2, rtol=2e-2)


def test_what_does_not_fit_is_refused():
    x, y = make_table(entry=(8,)).x, make_table(lengths=[1, 2], entry=(8,)).x
    for q, k in ((heads(x, 2), heads(y, 2)), (x.transpose(1, 2), x), (x, x.to_dense())):
        with pytest.raises((DispatchError, ValueError), match=r"[Pp]added"):
            attend(q, k, k)
