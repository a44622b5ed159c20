"""Attention of rows on both layouts, by CUDA's kernels and by the ops for the CPU, as a loop over the rows gives it."""

import functools
import itertools
import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import desugar
from subclasses import _torch
from subclasses.ragged import JaggedTensor, PaddedTensor
from subclasses.ragged.attention import flex, fused, grouping, row_dropout, rule
from subclasses.ragged.attention.fused import Kernel, kernel_for
from subclasses.ragged.attention.row_attention import ragged_attention
from subclasses.ragged.attention.row_dropout import ragged_attention_dropout
from tests.doors import DOORS
from tests.subclasses.ragged.judge import (
    KINDS,
    LAYOUTS,
    WAYS,
    alike,
    check_leaves,
    eager,
    hold,
    judged,
    judged_by_rows,
    make,
    pairs_of,
    random,
    same,
)
from tests.tables import raising

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
    sweep=40,
    entry=(8,),
)


def allowed(*size):
    """Each query has a key."""
    return lambda x: (torch.rand(*size, *[x.shape[1]] * 2) > 0.3) | torch.eye(x.shape[1], dtype=torch.bool)


# Of a value [4, T, 8].
MASKS = {
    "bool": allowed(),
    "bool, one for each row": allowed(4, 1),
    "of the lengths": lambda x: (x.mask()[:, :, None] & x.mask()[:, None, :]).unsqueeze(1),
    "added": lambda x: random(x.shape[1], x.shape[1]),
    "added, one for each row": lambda x: random(4, 1, x.shape[1], x.shape[1]),
    "heads": lambda x: random(2, 1, x.shape[1]),
}


def attend_row(row, i, mask):
    n, t = len(row), mask.shape[-1]
    part = mask.expand(4, 2, t, t)[i, None, :, :n, :n]
    return attend_itself(row[None], part)[0] if n else row * 1


test_a_mask = judged(
    {
        name: (attend_itself, attend_row, lambda layout, make_mask=make_mask: make_mask(make(layout).x))
        for name, make_mask in MASKS.items()
    },
    pairs_of(LAYOUTS, WAYS),
    sweep=36,
    entry=(8,),
)


def attend_to(q, k, options):
    return together(attend(heads(q), heads(k), heads(k * 2), **options))


# A row without keys gives zeros.
KEYS_OF_OTHER_LENGTHS = {
    f"{lengths}, {options}": (
        lambda q, k, options=options: attend_to(q, k, options),
        lambda queries, keys, options=options: [
            attend_to(q[None], k[None], options)[0] if len(q) and len(k) else q * 0
            for q, k in zip(queries, keys, strict=True)
        ],
        lambda layout, lengths=lengths: make(layout, lengths, (8,), width=6),
    )
    for lengths in ([2, 3, 6, 4], [2, 3, 0, 6])
    for options in ({}, {"is_causal": True}, {"scale": 0.5})
}
test_keys_of_other_lengths = judged_by_rows(
    KEYS_OF_OTHER_LENGTHS, pairs_of(LAYOUTS, WAYS), sweep=36, entry=(8,)
)


def attend_dense_keys(x, keys):
    return together(attend(heads(x), heads(keys), heads(keys * 2), is_causal=True))


def attend_dense_queries(x, queries):
    """The result is dense; its sum for each row has a row's size."""
    return x * together(attend(heads(queries), heads(x), heads(x.tanh()))).sum(-2, keepdim=True)


test_dense_operands = judged(
    {
        each.__name__: (
            each,
            lambda row, i, y, each=each: each(row, y[i]) if len(row) else row * 1,
            (4, 5, 8),
        )
        for each in (attend_dense_keys, attend_dense_queries)
    },
    pairs_of(LAYOUTS, WAYS),
    entry=(8,),
)


# The path by padded tables, which a mask needs.
test_keys_with_holes_and_rows_without_keys_beside_a_mask = judged_by_rows(
    {
        "all keys": (
            lambda q, k: attend(q, k, k, attn_mask=torch.ones(3, 4, dtype=torch.bool)),
            lambda queries, keys: [
                attend(q, k, k) if len(k) else q * 0 for q, k in zip(queries, keys, strict=True)
            ],
            lambda layout: make("holes", [0, 4], (8,)),
        )
    },
    [("back to back", eager)],
    lengths=[3, 2],
    entry=(8,),
)


def in_half_precision(layout, dtype):
    rows = [torch.randn(n, 8).to(dtype) for n in (3, 5)]
    return attend_itself(hold(layout, rows)), [attend_itself(row[None])[0] for row in rows]


test_half_precision = same(
    {
        str(dtype): lambda layout, dtype=dtype: in_half_precision(layout, dtype)
        for dtype in (torch.bfloat16, torch.float16)
    },
    *LAYOUTS,
    tolerance=2e-2,
)


# ---- flex_attention --------------------------------------------------------------------------------------------


def past(b, h, i, j):
    return i >= j


def flexed(q, k, mask):
    """Two heads of queries to one of keys, in the dtype of autocast; the nearer a key, the more it counts."""
    blocks = mask and create_block_mask(mask, q.shape[0], None, q.shape[-2], k.shape[-2], device="cpu")
    nearer, keys = (lambda score, b, h, i, j: score - (i - j).abs() * 0.1), heads(k, 1)
    with torch.autocast("cpu", enabled=q.dtype == torch.float32):
        return together(flex_attention(heads(q), keys, keys * 2, nearer, blocks, enable_gqa=True))


def flexed_row(q, k, mask):
    """The same of one row, by scores that a mask is added to."""
    i, j = torch.arange(len(q)).unsqueeze(1), torch.arange(len(k))
    bias = torch.where(mask(0, 0, i, j) if mask else i == i, -0.1 * (i - j).abs(), -math.inf)
    keys = heads(k[None], 1).to(q.dtype)
    return together(attend(heads(q[None]), keys, keys * 2, bias.to(q.dtype), enable_gqa=True))[0]


def flexed_by_rows(layout, door, mask, dtype):
    queries = [torch.randn(n, 8, dtype=dtype) for n in (2, 3, 0, 4, 140)]
    keys = [torch.randn(n, 4, dtype=dtype) for n in (2, 3, 4, 0, 130)]
    found = door(flexed)(hold(layout, queries), hold(layout, keys), mask)
    expected = [flexed_row(q, k, mask) if len(k) else q * 0 for q, k in zip(queries, keys, strict=True)]
    return found, [row.to(torch.bfloat16 if dtype == torch.float32 else dtype) for row in expected]


test_flex_attention = pytest.mark.filterwarnings("ignore:flex_attention called without")(
    same(
        {
            f"{name}, {mask and mask.__name__}, {dtype}": functools.partial(
                flexed_by_rows, door=door, mask=mask, dtype=dtype
            )
            for name, door in DOORS.items()
            for mask, dtype in ((None, torch.float64), (past, torch.float32))
        },
        *LAYOUTS,
        tolerance=3e-2,
    )
)


@pytest.mark.parametrize("mask", [None, past])
def test_blocks_without_an_entry_leave_the_mask(mask):
    ends, size = torch.tensor([300, 0, 130]), 128 if mask else flex._LARGEST
    x = heads(JaggedTensor.from_tensors([torch.randn(n, 8) for n in ends]))
    given = create_block_mask(past, 3, None, 300, 300, device="cpu").as_tuple()[:-3]
    _, _, *found, _, _ = flex._blocks_of_rows((*given, size, size, mask), x, x)
    exists = lambda b, h, i, j: (i >= j if mask else True) & (i < ends[b]) & (j < ends[b])  # noqa: E731
    want = create_block_mask(exists, 3, None, 300, 300, device="cpu").to_dense()
    assert BlockMask((300, 300), *found[:8]).to_dense().equal(want) and found[2:4] == [None, None]


# ---- dropout ---------------------------------------------------------------------------------------------------

two_kinds = pytest.mark.parametrize("kind", ["jagged", "padded"])


def make_rows(kind, lengths=(30, 0, 1, 45)):
    torch.manual_seed(0)
    rows = [torch.randn(n, 8, requires_grad=True) for n in lengths]
    return KINDS[kind](rows), rows


def drop(x, p=0.4):
    h = heads(x)
    return together(attend(h, h, h, dropout_p=p, is_causal=True))


def results(x, rows, p=0.4):
    torch.manual_seed(3)
    total = torch.cat(drop(x, p).to_tensors()).square().sum()
    return [total.detach(), *torch.autograd.grad(total, rows)]


@two_kinds
def test_a_seed_gives_the_same_result_again_and_1_and_0_all_or_nothing(kind):
    x, rows = make_rows(kind)
    torch.testing.assert_close(*(results(*make_rows(kind)) for _ in range(2)), atol=0, rtol=0)
    assert not torch.equal(drop(x).to_dense(), drop(x).to_dense())
    assert all(not t.any() for t in results(x, rows, 1.0))
    layer = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True).eval()
    state = torch.get_rng_state()
    drop(x, 0.0), layer(x, x, x, need_weights=False)
    assert torch.get_rng_state().equal(state)  # nothing is drawn


def attend_widely(x, width, **options):
    h = heads(x)
    return attend(h, h, torch.cat([h, h, h], -1)[..., :width], **options)


# Without dropout, and with dropout of almost nothing.
test_values_of_another_width = judged(
    {
        f"{width}, {p}": (
            lambda x, width=width, p=p: attend_widely(x, width, dropout_p=p),
            of_row(functools.partial(attend_widely, width=width)),
        )
        for width in (2, 12)
        for p in (0.0, 1e-9)
    },
    pairs_of(["back to back"]),
    entry=(8,),
    lengths=[3, 2, 5, 1],
)


@two_kinds
def test_the_mean_of_many_draws_is_the_attention_without_dropout(kind):
    x, _ = make_rows(kind, (3, 2))
    with torch.no_grad():
        mean = sum(torch.cat(drop(x, 0.3).to_tensors()) for _ in range(500)) / 500
        torch.testing.assert_close(mean, torch.cat(drop(x, 0.0).to_tensors()), atol=0.15, rtol=0.1)


def scaled(x, scale):
    """Attention to values that a parameter scales, in which the result is linear."""
    h = heads(x)
    return attend(h, h, h * scale, dropout_p=0.4).transpose(1, 2)


REGIONS = {
    "plain": scaled,
    "saved tensors": lambda *args: checkpoint(scaled, *args, use_reentrant=False),
    "reentrant": lambda *args: checkpoint(scaled, *args, use_reentrant=True),
}
KERNELS = {"stock": torch.compile, "direct": desugar.compile}


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("door", "region"),
    [
        *itertools.product(DOORS.values(), REGIONS),
        *(pytest.param(door, "plain", marks=pytest.mark.slow) for door in KERNELS.values()),
    ],
)
def test_forward_and_backward_use_one_mask(door, region):
    """The loss is linear in the scale, so its gradient equals the loss only if both passes use one mask."""
    x, _ = make_rows("jagged")
    scale, run = torch.tensor(1.0, requires_grad=True), door(REGIONS[region])
    losses = [run(x, scale).values.sum() for _ in range(2)]
    for loss in losses:
        scale.grad = None
        loss.backward()
        torch.testing.assert_close(scale.grad, loss.detach())
    assert losses[0] != losses[1]


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


ROWS = [torch.randn(n, 8) for n in (3, 5)]
BATCH = PaddedTensor.from_tensors(ROWS, multiple=8, batch_multiple=4)
test_a_padded_batch_attends = same(
    {
        "causal": lambda: (
            attend_itself(BATCH.with_padded(BATCH.to_dense(fill=float("nan"))), is_causal=True),
            [attend_itself(row[None], is_causal=True)[0] for row in ROWS],
        ),
        "it keeps the number of rows": lambda: (
            attend_itself(BATCH, is_causal=True).row_count is BATCH.row_count,
            True,
        ),
    }
)

JAGGED, PADDED = (
    cls.from_tensors([torch.randn(n, 8) for n in (3, 5)]) for cls in (JaggedTensor, PaddedTensor)
)
SDPA = "scaled_dot_product_attention"


test_what_does_not_fit_is_refused = raising(
    [
        (lambda: attend(JAGGED.mT, JAGGED.mT, JAGGED.mT), SDPA),
        (lambda: attend(JAGGED, JAGGED.to_dense(), JAGGED), ValueError, "same length"),
        (lambda: attend(heads(PADDED), heads(PADDED[:1]), heads(PADDED[:1])), ValueError, "[Pp]added"),
        (lambda: attend(PADDED.transpose(1, 2), PADDED, PADDED), "[Pp]added"),
        *(
            (lambda x=x, p=p: drop(x, p), ValueError, f"between 0 and 1, got {p}")
            for x in (JAGGED, PADDED)
            for p in (-0.1, 1.5)
        ),
        (lambda: attend(PADDED, PADDED.to_dense()[0], PADDED), "[Pp]added"),
    ]
)


# ==== CUDA's kernels ================================================================================================

LENGTHS, OTHERS, FULL = [3, 1, 5], [4, 0, 2], [3, 2, 5, 1]
BACK_TO_BACK = pairs_of(["back to back"])

# ---- the contract of the kernels -------------------------------------------------------------------------------


def attend_rows(q, k, v, starts, causal, last, scale):  # noqa: PLR0913
    """The contract of both kernels, as a loop; ``last``: the last query of a row sees its last key."""
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in starts)
    assert all(t.stride(-1) == 1 and t.shape[-1] % 8 == 0 for t in (q, k, v))
    out = []
    for (a, b), (c, d) in zip(*(pairwise(t.tolist()) for t in starts), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d]) * scale
        if causal:
            seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril((d - c) - (b - a) if last else 0)
            scores = scores.masked_fill(~seen, -math.inf)
        row = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[c:d])
        out.append(row if d > c else row + q[a:b] * torch.nan)  # undefined by the contract
    return torch.cat(out)


def flash(q, k, v, q_starts, k_starts, max_q, max_k, dropout_p, causal, debug, *, scale):  # noqa: PLR0913
    assert q.dim() == 3 and not debug and not dropout_p
    assert max_q >= q_starts.diff().max() and max_k >= k_starts.diff().max()
    return (attend_rows(q, k, v, (q_starts, k_starts), causal, True, scale),)


def efficient(q, k, v, bias, q_starts, k_starts, max_q, max_k, dropout_p, mask_type, lse, *, scale):  # noqa: PLR0913
    assert q.dim() == 4 and q.shape[0] == 1 and bias is None and lse and not dropout_p and mask_type in (0, 1)
    assert max_q >= q_starts.diff().max() and max_k >= k_starts.diff().max()
    parts = (t.squeeze(0) for t in (q, k, v))
    return (attend_rows(*parts, (q_starts, k_starts), mask_type == 1, False, scale)[None],)


@pytest.fixture(params=Kernel, ids=lambda kernel: kernel.value)
def kernel(request, monkeypatch):
    """A kernel by its contract, chosen on the CPU."""
    monkeypatch.setattr(rule, "kernel_for", lambda *_: request.param)
    monkeypatch.setattr(fused, "flash_attention_rows", flash)
    monkeypatch.setattr(fused, "efficient_attention_rows", efficient)
    return request.param


# ---- rows, and a loop over them --------------------------------------------------------------------------------


def draw(lengths, features, heads=2, **options):
    """Rows ``[length, heads, features]``, and all of them as ``[B, heads, T, features]``."""
    options = {"dtype": torch.float64} | options
    rows = [torch.randn(n, heads, features, **options).requires_grad_() for n in lengths]
    return rows, JaggedTensor.from_tensors(rows).transpose(1, 2)


def loop(q, k, v, **options):
    """The attention of each row by itself; 0 where it has no keys."""

    def attend(*row):
        heads = (t.transpose(0, 1)[None] for t in row)
        return F.scaled_dot_product_attention(*heads, **options)[0].transpose(0, 1)

    return [attend(*row) if len(row[1]) else row[0] * 0 for row in zip(q, k, v, strict=True)]


def check(got, expected, leaves, **tolerance):
    """Compares what came out row by row, and then the gradients of all leaves."""
    check_leaves(got.transpose(1, 2), expected, leaves, **tolerance)


# ---- on the CPU, by the contracts ------------------------------------------------------------------------------


def by_kernels(test):
    """A test of a table in which both kernels compute."""
    return pytest.mark.usefixtures("kernel")(test)


test_rows_attend_to_themselves, test_rows_attend_with_wide_heads, test_rows_attend_with_narrow_heads = (
    by_kernels(
        judged(
            {str(options): with_options(attend_itself, options) for options in OPTIONS},
            BACK_TO_BACK,
            entry=(2 * width,),
        )
    )
    for width in (8, 16, 5)
)
test_rows_attend_in_groups_of_heads_and_without_heads = by_kernels(
    judged(
        {
            "in groups": (*with_options(attend_groups, {}), (8, 4), (8, 4)),
            "without heads": alike(lambda t: attend(t, t, t) if t.dim() > 2 else attend(*[t[None]] * 3)[0]),
        },
        BACK_TO_BACK,
        entry=(8,),
        lengths=FULL,
    )
)
test_rows_attend_to_rows_of_other_lengths = by_kernels(
    judged_by_rows(
        # Flash attention is not chosen for those that are causal.
        {name: case for name, case in KEYS_OF_OTHER_LENGTHS.items() if "causal" not in name},
        BACK_TO_BACK,
        entry=(8,),
    )
)


@pytest.mark.parametrize("chosen", Kernel, ids=lambda kernel: kernel.value)
def test_pytorch_knows_the_kernels_like_that(chosen, monkeypatch):
    """Forward and backward of the ops themselves, without data: names, order and number of the arguments."""
    if chosen is Kernel.EFFICIENT and not _torch.efficient_attention_traces:
        pytest.skip("its backward has no working meta kernel in this release")
    monkeypatch.setattr(rule, "kernel_for", lambda *_: chosen)
    rows, x = draw(LENGTHS, 6, device="meta", dtype=torch.float16)
    _, y = draw(OTHERS, 6, device="meta", dtype=torch.float16)
    for out in (
        F.scaled_dot_product_attention(x, x, x, is_causal=True),
        F.scaled_dot_product_attention(x, y, y, dropout_p=0.1),
    ):
        assert out.shape == x.shape and out.dtype == torch.float16
        grads = torch.autograd.grad(out.sum(), rows)
        assert [g.shape for g in grads] == [row.shape for row in rows]


def fake_rows(dtype=torch.float16, features=8, device="cuda", **parts):
    values, starts = torch.empty(2, 9, features, device=device, dtype=dtype), torch.empty(4, device=device)
    return JaggedTensor(values, starts.long(), ragged_dim=2, **{"max_length": 5} | parts)


# How queries, keys and values are made, and which kernel is chosen for them, also where it is causal.
CHOSEN = {
    "itself": (lambda: [fake_rows()] * 3, Kernel.FLASH, Kernel.FLASH),
    "other rows": (lambda: [fake_rows(), *[fake_rows()] * 2], Kernel.FLASH, Kernel.EFFICIENT),
    "bfloat16": (lambda: [fake_rows(torch.bfloat16)] * 3, Kernel.FLASH, Kernel.FLASH),
    "float32": (lambda: [fake_rows(torch.float32)] * 3, Kernel.EFFICIENT, Kernel.EFFICIENT),
    "192 features": (lambda: [fake_rows(features=192)] * 3, Kernel.FLASH, Kernel.FLASH),
    "256 features": (lambda: [fake_rows(features=256)] * 3, Kernel.EFFICIENT, Kernel.EFFICIENT),
    "float64": (lambda: [fake_rows(torch.float64)] * 3, None, None),
    "the CPU": (lambda: [fake_rows(device="cpu")] * 3, None, None),
    "holes": (lambda: [fake_rows(lengths=torch.empty(3, device="cuda").long())] * 3, None, None),
    "no entries": (lambda: [fake_rows(max_length=0)] * 3, None, None),
    "several dtypes": (lambda: [fake_rows(), fake_rows(torch.bfloat16), fake_rows()], None, None),
}
# The same where a user allows one backend, or there is no device for any.
ALLOWED = {
    SDPBackend.FLASH_ATTENTION: Kernel.FLASH,
    SDPBackend.EFFICIENT_ATTENTION: Kernel.EFFICIENT,
    SDPBackend.MATH: None,
}
EVERY_CASE = [(*case, list(ALLOWED), True) for case in CHOSEN.values()]
EVERY_CASE += [(CHOSEN["itself"][0], kernel, kernel, [backend], True) for backend, kernel in ALLOWED.items()]
EVERY_CASE += [(CHOSEN["itself"][0], None, None, list(ALLOWED), False)]


@pytest.mark.parametrize(("make_operands", "expected", "causal", "allowed", "has_device"), EVERY_CASE)
def test_which_kernel(make_operands, expected, causal, allowed, has_device, monkeypatch):
    monkeypatch.setattr(fused, "_devices", lambda: (has_device, has_device))
    with _torch.fake_mode(), torch.no_grad(), sdpa_kernel(allowed):
        operands = make_operands()
        assert [kernel_for(*operands, is_causal) for is_causal in (False, True)] == [expected, causal]


def attend_elsewhere(keys, values):
    """Attention of a batch to keys and values that are those rows, of which one lies elsewhere."""
    return lambda x, y: together(attend(heads(x), heads(keys(x, y)), heads(values(x, y))))


OF_BOTH = {
    "keys": (lambda x, y: y, lambda x, y: x * 2),
    "values": (lambda x, y: x * 2, lambda x, y: y),
}
test_keys_or_values_that_lie_elsewhere = judged_by_rows(
    {
        name: (
            attend_elsewhere(*parts),
            lambda rows, others, parts=parts: [
                attend_elsewhere(*parts)(p[None], q[None])[0] if len(p) else p * 1
                for p, q in zip(rows, others, strict=True)
            ],
            lambda layout: make("holes", entry=(8,)),
        )
        for name, parts in OF_BOTH.items()
    },
    BACK_TO_BACK,
    entry=(8,),
)
X, TURNED, FEWER = (draw(lengths, 4)[1] for lengths in (LENGTHS, [5, 1, 3], [2]))
test_rows_that_do_not_fit_are_refused = raising(
    [
        (lambda: attend(X, X, TURNED), ValueError, "same length"),
        (lambda: attend(X, FEWER, FEWER), ValueError, "other numbers of rows"),
    ]
)


# ---- on a GPU --------------------------------------------------------------------------------------------------

TOLERANCE = {
    torch.float16: {"atol": 1e-2, "rtol": 1e-2},
    torch.bfloat16: {"atol": 5e-2, "rtol": 5e-2},
    torch.float32: {"atol": 1e-4, "rtol": 1e-4},
    torch.float64: {},
}


@pytest.mark.gpu
@pytest.mark.parametrize("door", ["eager", "desugar", "stock"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("features", [16, 20])
@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
@pytest.mark.parametrize("other", [[300, 1, 70, 0, 129], [3, 0, 170, 64, 129]], ids=["itself", "other rows"])
def test_on_a_gpu(other, dtype, features, options, door):
    (q, x), (k, y) = (draw(n, features, device="cuda", dtype=dtype) for n in ([300, 1, 70, 0, 129], other))
    run = DOORS[door](lambda x, y: F.scaled_dot_product_attention(x, y * 2, y + 1, **options))
    expected = loop(q, [r * 2 for r in k], [r + 1 for r in k], **options)
    check(run(x, y), expected, [*q, *k], **TOLERANCE[dtype])


@pytest.mark.gpu
def test_dropout_on_a_gpu():
    _, x = draw([300, 200], 16, device="cuda", dtype=torch.float16)
    got = F.scaled_dot_product_attention(x, x, torch.ones_like(x), dropout_p=0.5).float()
    assert abs(got.mean() - 1) < 0.05 and got.std() > 0.01


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_no_table_and_no_wait_on_a_gpu(dtype):
    """One long row among many short ones: a padded table of scores would be a thousand times as large.

    In single precision the backward of PyTorch's kernel works in two padded tables of queries.
    """
    lengths = [4096] + [4] * 255
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    values = torch.randn(sum(lengths), 4, 32, device="cuda", dtype=dtype, requires_grad=True)
    x = JaggedTensor(values, starts, max_length=4096).transpose(1, 2)
    F.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()  # the kernels are loaded now
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        F.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    tables = 0 if dtype == torch.float16 else 2 * len(lengths) * max(lengths) * values[0].nbytes
    assert torch.cuda.max_memory_allocated() - before < 40 * values.nbytes + tables


# ==== the ops on the CPU ==========================================================================================

COUNT, WIDTH, SCALE, SEED = 2, 8, 0.3, torch.tensor(5)
SIZES_OF_ROWS = {
    "about equal": ([9, 9, 8, 10], None),
    "very uneven": ([1, 40, 3, 0, 17, 40, 2], None),
    "long": ([400, 5, 380], None),
    "cross": ([3, 7, 0, 5, 4], [6, 2, 4, 0, 4]),
    "no rows": ([], []),
    "only empty rows": ([0, 0], None),
}


def make_offsets(lengths, gap=0):
    return torch.tensor([0, *lengths]).cumsum(0) + gap * torch.arange(len(lengths) + 1)


def make_inputs(q_lengths, k_lengths=None, gap=0, dtype=torch.float64):
    """Queries, keys and values, and where their rows lie; there is a gap after each row."""
    torch.manual_seed(0)
    q_and_k = q_lengths, q_lengths if k_lengths is None else k_lengths
    totals = [sum(n) + gap * len(n) for n in (*q_and_k, q_and_k[1])]
    inputs = [torch.randn(COUNT, t, WIDTH, dtype=dtype, requires_grad=True) for t in totals]
    offsets = [make_offsets(n, gap) for n in q_and_k]
    return inputs, (*offsets, *[torch.tensor(n, dtype=torch.int64) if gap else None for n in q_and_k])


def attend_op(inputs, rows, causal=False, scale=SCALE):
    return ragged_attention(*inputs, *rows, causal, scale)[0]


def drop_op(inputs, rows, causal=False, p=0.3, seed=SEED):
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
    return drop_op((*inputs[:2], places), rows, *options)


def loop_op(inputs, rows, causal=False, scale=SCALE, weights=None, p=0.0):
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


def check_op(got, expected, inputs):
    check_leaves([got], [expected], inputs if expected.requires_grad else ())


# ---- against a loop -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=8), st.booleans())
def test_any_lengths(lengths, causal):
    inputs, rows = make_inputs([n for n, _ in lengths], [m for _, m in lengths])
    check_op(attend_op(inputs, rows, causal), loop_op(inputs, rows, causal), inputs)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gap", [0, 2], ids=["back to back", "holes"])
@pytest.mark.parametrize("case", SIZES_OF_ROWS)
def test_both_ops_equal_a_loop_with_the_same_mask(monkeypatch, case, gap, causal, p):
    if case != "long":  # several blocks of queries for short rows, too
        monkeypatch.setattr(row_dropout, "_BLOCK", 64)
        monkeypatch.setattr(row_dropout, "_QUERIES", 4)
    inputs, rows = make_inputs(*SIZES_OF_ROWS[case], gap)
    weights, got = weights_of(inputs, rows, causal, p), drop_op(inputs, rows, causal, p)
    if p == 0:
        check_op(attend_op(inputs, rows, causal), loop_op(inputs, rows, causal), inputs)
    check_op(got, loop_op(inputs, rows, causal, weights=weights, p=p), inputs)


def test_transposed_values_as_a_model_makes_them():
    _, rows = make_inputs([5, 3, 6])
    inputs = [x.transpose(0, 1) for x in torch.randn(14, 3, COUNT, WIDTH).unbind(1)]
    out = attend_op(inputs, rows, True)
    torch.testing.assert_close(out, loop_op(inputs, rows, True))
    assert out.transpose(0, 1).is_contiguous()  # joining the heads again is free


@pytest.mark.parametrize("op", [attend_op, drop_op])
def test_a_row_of_nan_reaches_no_other_row(op):
    inputs, rows = make_inputs([4, 5, 5])
    for x in inputs:
        x.data[:, 4:9] = float("nan")
    out = op(inputs, rows, True)
    others = out[:, :4], out[:, 9:]
    assert all(row.isfinite().all() for row in others)
    sum(row.sum() for row in others).backward()
    assert all(x.grad[:, :4].isfinite().all() and x.grad[:, 9:].isfinite().all() for x in inputs)


def test_scores_far_apart():
    inputs, rows = make_inputs([6, 6])
    inputs = [x.detach().mul(60).requires_grad_() for x in inputs]
    grads = [torch.autograd.grad(f(inputs, rows, True, 1.0).sum(), inputs) for f in (attend_op, loop_op)]
    torch.testing.assert_close(*grads, atol=1e-9, rtol=1e-7)


# ---- dropout ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_a_share_of_the_weights_is_dropped_and_the_rest_scaled(p):
    whole, weights = (weights_of(*make_inputs([400, 90, 250]), False, q) for q in (0.0, p))
    exists, kept = whole > 0, weights != 0
    dropped = float((exists & ~kept).sum() / exists.sum())
    assert abs(dropped - p) < 5 * math.sqrt(p * (1 - p) / int(exists.sum()))
    factor = 65536 / (65536 - round(p * 65536))
    torch.testing.assert_close(weights[kept], whole[kept] * factor)
    torch.testing.assert_close(factor, 1 / (1 - p), rtol=1e-4, atol=0)


def test_masks_differ_by_seed_head_and_row():
    first, again, other = (
        weights_of(*make_inputs([64, 64]), False, 0.5, torch.tensor(s)) == 0 for s in (1, 1, 2)
    )
    assert first.equal(again) and not first.equal(other)
    parts = [first[0, :64], first[1, :64], first[0, 64:], other[0, :64]]
    for a, b in itertools.combinations(parts, 2):
        assert abs((a == b).double().mean() - 0.5) < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision(dtype):
    inputs, rows = make_inputs([3, 7, 5, 200], dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    got, want = (drop_op(x, rows, True, 0.2) for x in (inputs, exact))
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), want, atol=2e-2, rtol=2e-2)
    grads = [torch.autograd.grad(o.cos().sum(), x) for o, x in ((got, inputs), (want, exact))]
    assert all(mine.dtype is dtype for mine in grads[0])
    torch.testing.assert_close(*grads, atol=5e-2, rtol=5e-2, check_dtype=False)


# ---- plans -----------------------------------------------------------------------------------------------------


def plan_for(rows, lengths, make_plan=grouping.plan_for):
    return make_plan(rows, rows, grouping.Sizes(sum(lengths), sum(lengths), COUNT), True)


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
    inputs, rows = make_inputs([3, 0, 5])
    more = [] if op is ragged_attention else [0.3]
    torch.library.opcheck(op, (*inputs, *[SEED] * len(more), *rows, True, SCALE, *more))


def test_a_second_derivative_is_refused():
    inputs, rows = make_inputs([3])
    (grad,) = torch.autograd.grad(attend_op(inputs, rows, True).sum(), inputs[:1], create_graph=True)
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.autograd.grad(grad.sum(), inputs[1:2])
