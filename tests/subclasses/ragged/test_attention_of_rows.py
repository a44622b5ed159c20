"""Attention of rows, on both layouts, with a loop over the rows through ``scaled_dot_product_attention`` as judge."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from subclasses import DispatchError
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.subclasses.ragged.judge import (
    LAYOUTS,
    WAYS,
    check_parts,
    hold,
    judge_rows,
    judged,
    layouts,
    make,
    pairs_of,
    random,
    ways,
)

attend = F.scaled_dot_product_attention


def heads(x, count=2):
    """``[B, T, D]`` to ``[B, heads, T, D / heads]``; of a row without B."""
    return x.unflatten(-1, (count, -1)).transpose(-3, -2)


def together(x):
    return x.transpose(-3, -2).flatten(-2)


def attend_itself(x, *mask, **options):
    q, k, v = (heads(t) for t in (x, x * 2, x.tanh()))
    return together(attend(q, k, v, *mask, **options))


def attend_groups(x, keys, values, **options):
    """Four heads of queries to two of keys and values."""
    return together(attend(heads(x, 4), heads(x @ keys, 2), heads(x @ values, 2), enable_gqa=True, **options))


def of_row(run):
    """The same of one row, which may be empty."""
    return lambda row, _, *more: run(row[None], *more)[0] if len(row) else row * 1


OPTIONS = [{}, {"is_causal": True}, {"scale": 0.3}, {"is_causal": True, "scale": 0.5}]


def with_options(run, options):
    """A function of a batch with these options, and the same of a row."""
    call = functools.partial(run, **options)
    return call, of_row(call)


test_attention = judged(
    {f"to itself, {options}": with_options(attend_itself, options) for options in OPTIONS}
    | {
        f"in groups, {options}": (*with_options(attend_groups, options), (8, 4), (8, 4))
        for options in OPTIONS
    },
    pairs_of(LAYOUTS, WAYS),
    sweep=20,
    entry=(8,),
)

# Of a value [4, T, 8].
MASKS = {
    "bool": lambda x, t: torch.rand(t, t) > 0.3,
    "bool, one for each row": lambda x, t: torch.rand(4, 1, t, t) > 0.3,
    "of the lengths": lambda x, t: (x.mask()[:, :, None] & x.mask()[:, None, :]).unsqueeze(1),
    "added": lambda x, t: random(t, t),
    "added, one for each row": lambda x, t: random(4, 1, t, t),
    "heads": lambda x, t: random(2, 1, t),
}


@pytest.mark.sweep(12)
@ways
@layouts
@pytest.mark.parametrize("name", MASKS)
def test_a_mask(name, layout, way):
    x = make(layout, entry=(8,)).x
    t = x.shape[1]
    mask = MASKS[name](x, t)
    if mask.dtype == torch.bool and name != "of the lengths":
        mask = mask | torch.eye(t, dtype=torch.bool)  # each query has a key

    def on_row(row, i, m=mask):
        n = len(row)
        return attend_itself(row[None], m.expand(4, 2, t, t)[i, None, :, :n, :n])[0] if n else row * 1

    parameters = [mask] if mask.requires_grad else []
    call = attend_itself if parameters else lambda x: attend_itself(x, mask)
    judge_rows(layout, call, on_row, parameters, entry=(8,), way=way)


@pytest.mark.sweep(9)
@ways
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.5}], ids=str)
@pytest.mark.parametrize("lengths", [[2, 3, 6, 4], [2, 3, 0, 6]], ids=str)
@layouts
def test_keys_of_other_lengths(layout, lengths, options, way):
    """A row without keys gives zeros."""
    asked, given = make(layout, entry=(8,)), make(layout, lengths, (8,), width=6)

    def run(q, k):
        return together(attend(heads(q), heads(k), heads(k * 2), **options))

    pairs = zip(asked.rows, given.rows, strict=True)
    expected = [run(q[None], k[None])[0] if len(q) and len(k) else q * 0 for q, k in pairs]
    check_parts(asked, way(run)(asked.x, given.x), expected, [] if layout == "holes" else [given.leaf])


def test_keys_with_holes_and_rows_without_keys_beside_a_mask():
    """The path by padded tables, which a mask needs."""
    a, b = make("back to back", [3, 2], (8,)), make("holes", [0, 4], (8,))
    q, kv = a.x.unsqueeze(1), b.x.unsqueeze(1)
    got = attend(q, kv, kv, attn_mask=torch.ones(3, 4, dtype=torch.bool))
    check_parts(a, got, attend(q, kv, kv).to_tensors())
    assert (got[0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@layouts
def test_half_precision(layout, dtype):
    rows = [torch.randn(n, 8).to(dtype) for n in (3, 5)]
    expected = [attend_itself(row[None])[0] for row in rows]
    got = attend_itself(hold(layout, rows)).to_tensors()
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


# ---- padded batches and caches ---------------------------------------------------------------------------------


def test_one_query_for_each_row_and_a_cache_of_keys():
    """A decoding step: the rows of the cache differ, the queries are one each."""
    cache, new = make("padded", entry=(8,)), torch.randn(4, 8, dtype=torch.float64)
    keys = heads(cache.x.detach().append(new))
    query = PaddedTensor(new[:, None], torch.ones(4, dtype=torch.int64))
    expected = []
    for row, q in zip(cache.rows, new, strict=True):
        k = heads(torch.cat([row.detach(), q[None]])[None])
        expected.append(together(attend(heads(q[None, None]), k, k))[0])
    torch.testing.assert_close(together(attend(heads(query), keys, keys)).to_tensors(), expected)


def test_a_padded_batch_attends():
    rows = [torch.randn(n, 8) for n in (3, 5)]
    x = PaddedTensor.from_tensors(rows, multiple=8, batch_multiple=4)
    got = attend_itself(x.with_padded(x.to_dense(fill=float("nan"))), is_causal=True)
    torch.testing.assert_close(
        got.to_tensors(), [attend_itself(row[None], is_causal=True)[0] for row in rows]
    )
    assert got.row_count is x.row_count


JAGGED, PADDED = (
    cls.from_tensors([torch.randn(n, 8) for n in (3, 5)]) for cls in (JaggedTensor, PaddedTensor)
)
SDPA = "scaled_dot_product_attention"


@pytest.mark.parametrize(
    ("operands", "error", "words"),
    [
        ((JAGGED.mT, JAGGED.mT, JAGGED.mT), DispatchError, SDPA),
        ((JAGGED, JAGGED.to_dense(), JAGGED), DispatchError, SDPA),
        ((heads(PADDED), heads(PADDED[:1]), heads(PADDED[:1])), ValueError, "[Pp]added"),
        ((PADDED.transpose(1, 2), PADDED, PADDED), DispatchError, "[Pp]added"),
        ((PADDED, PADDED.to_dense(), PADDED.to_dense()), DispatchError, "[Pp]added"),
    ],
)
def test_what_does_not_fit_is_refused(operands, error, words):
    with pytest.raises(error, match=words):
        attend(*operands)
