"""Attention of rows, on both layouts and by CUDA's kernels, with ``scaled_dot_product_attention`` of rows as judge."""

from __future__ import annotations

import functools
import itertools
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import desugar
from subclasses import _torch
from subclasses.ragged import JaggedTensor, PaddedTensor
from subclasses.ragged.attention import fused, rule
from subclasses.ragged.attention.fused import Kernel, kernel_for
from tests.doors import DOORS
from tests.subclasses.ragged.judge import (
    KINDS,
    LAYOUTS,
    WAYS,
    check_leaves,
    check_parts,
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
    sweep=20,
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
    sweep=12,
    entry=(8,),
)


def attend_to(q, k, options):
    return together(attend(heads(q), heads(k), heads(k * 2), **options))


# A row without keys gives zeros.
test_keys_of_other_lengths = judged_by_rows(
    {
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
    },
    pairs_of(LAYOUTS, WAYS),
    sweep=9,
    entry=(8,),
)


def test_keys_with_holes_and_rows_without_keys_beside_a_mask():
    """The path by padded tables, which a mask needs."""
    a, b = make("back to back", [3, 2], (8,)), make("holes", [0, 4], (8,))
    q, kv = a.x.unsqueeze(1), b.x.unsqueeze(1)
    got = attend(q, kv, kv, attn_mask=torch.ones(3, 4, dtype=torch.bool))
    check_parts(a, got, attend(q, kv, kv).to_tensors())
    assert (got[0] == 0).all()


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
    for p in (-0.1, 1.5):
        with pytest.raises(ValueError, match=f"between 0 and 1, got {p}"):
            drop(x, p)


def attend_widely(x, width, **options):
    h = heads(x)
    return attend(h, h, torch.cat([h, h, h], -1)[..., :width], **options)


@pytest.mark.parametrize("width", [2, 12])
def test_values_of_another_width(width):
    """Without dropout, and with dropout of almost nothing, as the same rows one by one."""
    x, rows = make_rows("jagged")
    expected = [
        attend_widely(row[None], width)[0] if len(row) else row.new_zeros(2, 0, width) for row in rows
    ]
    for p in (0.0, 1e-9):
        got = attend_widely(x, width, dropout_p=p)
        torch.testing.assert_close(got.to_tensors(), expected)
    got.values.sum().backward()


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
        (lambda: attend(JAGGED, JAGGED.to_dense(), JAGGED), SDPA),
        (lambda: attend(heads(PADDED), heads(PADDED[:1]), heads(PADDED[:1])), ValueError, "[Pp]added"),
        (lambda: attend(PADDED.transpose(1, 2), PADDED, PADDED), "[Pp]added"),
        (lambda: attend(PADDED, PADDED.to_dense(), PADDED.to_dense()), "[Pp]added"),
    ]
)


# ==== CUDA's kernels ================================================================================================

LENGTHS, OTHERS = [3, 1, 5], [4, 0, 2]

# ---- what the kernels promise ----------------------------------------------------------------------------------


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
        out.append(row if d > c else row + q[a:b] * torch.nan)  # nobody says what is there
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


def draw(
    lengths: list[int], features: int, heads: int = 2, **options: Any
) -> tuple[list[Tensor], JaggedTensor]:
    """Rows ``[length, heads, features]``, and all of them as ``[B, heads, T, features]``."""
    options = {"dtype": torch.float64} | options
    rows = [torch.randn(n, heads, features, **options).requires_grad_() for n in lengths]
    return rows, JaggedTensor.from_tensors(rows).transpose(1, 2)


def loop(q, k, v, **options: Any) -> list[Tensor]:
    """The attention of each row by itself; 0 where it has no keys."""

    def attend(*row):
        heads = (t.transpose(0, 1)[None] for t in row)
        return F.scaled_dot_product_attention(*heads, **options)[0].transpose(0, 1)

    return [attend(*row) if len(row[1]) else row[0] * 0 for row in zip(q, k, v, strict=True)]


def check(got: JaggedTensor, expected: list[Tensor], leaves: list[Tensor], **tolerance: Any) -> None:
    """Compares what came out row by row, and then the gradients of all leaves."""
    check_leaves(got.transpose(1, 2), expected, leaves, **tolerance)


# ---- on the CPU, by the contracts ------------------------------------------------------------------------------


attention_options = pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)


@pytest.mark.parametrize("features", [8, 5, 16])
@attention_options
def test_rows_attend_to_themselves(kernel, features, options):
    (q, x), (k, y), (v, z) = (draw(LENGTHS, features) for _ in range(3))
    y, z = (x.with_values(t.unwrap("values")) for t in (y, z))
    check(F.scaled_dot_product_attention(x, y, z, **options), loop(q, k, v, **options), [*q, *k, *v])


@pytest.mark.parametrize(
    ("lengths", "heads", "options"), [(OTHERS, 4, {}), (LENGTHS, 2, {"enable_gqa": True})], ids=str
)
def test_rows_attend_to_rows_of_other_lengths_and_in_groups_of_heads(kernel, lengths, heads, options):
    (q, x), (k, y), (v, z) = draw(LENGTHS, 6, heads=4), *(draw(lengths, 6, heads=heads) for _ in range(2))
    check(F.scaled_dot_product_attention(x, y, z, **options), loop(q, k, v, **options), [*q, *k, *v])


def test_rows_without_heads(kernel):
    rows = [torch.randn(n, 6, dtype=torch.float64) for n in LENGTHS]
    x = JaggedTensor.from_tensors(rows)
    expected = [F.scaled_dot_product_attention(*[row[None]] * 3)[0] for row in rows]
    torch.testing.assert_close(F.scaled_dot_product_attention(x, x, x).to_tensors(), expected)


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


def fake_rows(dtype=torch.float16, features=8, device="cuda", **parts: Any) -> JaggedTensor:
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


def test_values_that_lie_otherwise():
    """Keys and values have the same rows, wherever they lie; anything else raises."""
    for keys_have_holes in (True, False):
        (q, x), (k, y) = draw(LENGTHS, 4), draw(LENGTHS, 4)
        table = torch.nn.utils.rnn.pad_sequence(q, batch_first=True, padding_value=torch.nan).flatten(0, 1)
        held = JaggedTensor(table, torch.tensor([0, 5, 10, 15]), lengths=torch.tensor(LENGTHS)).transpose(
            1, 2
        )
        keys, values = (held, x) if keys_have_holes else (x, held)
        check(F.scaled_dot_product_attention(y, keys, values), loop(k, q, q), [*q, *k])
    with pytest.raises(ValueError, match="same length"):
        F.scaled_dot_product_attention(x, x, draw([5, 1, 3], 4)[1])
    with pytest.raises(ValueError, match="other numbers of rows"):
        F.scaled_dot_product_attention(x, draw([2], 4)[1], draw([2], 4)[1])


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
@attention_options
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
