"""Attention over ragged rows by CUDA's kernels: which is chosen, what it is given, and on a GPU what it computes."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from subclasses import _torch
from subclasses.ragged import JaggedTensor
from subclasses.ragged.attention import fused, rule
from subclasses.ragged.attention.fused import Kernel, kernel_for
from tests.doors import DOORS
from tests.subclasses.ragged.judge import check_leaves

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


def make(
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


OPTIONS = pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)


@pytest.mark.parametrize("features", [8, 5, 16])
@OPTIONS
def test_rows_attend_to_themselves(kernel, features, options):
    (q, x), (k, y), (v, z) = (make(LENGTHS, features) for _ in range(3))
    y, z = (x.with_values(t.unwrap("values")) for t in (y, z))
    check(F.scaled_dot_product_attention(x, y, z, **options), loop(q, k, v, **options), [*q, *k, *v])


@pytest.mark.parametrize(
    ("lengths", "heads", "options"), [(OTHERS, 4, {}), (LENGTHS, 2, {"enable_gqa": True})], ids=str
)
def test_rows_attend_to_rows_of_other_lengths_and_in_groups_of_heads(kernel, lengths, heads, options):
    (q, x), (k, y), (v, z) = make(LENGTHS, 6, heads=4), *(make(lengths, 6, heads=heads) for _ in range(2))
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
    rows, x = make(LENGTHS, 6, device="meta", dtype=torch.float16)
    _, y = make(OTHERS, 6, device="meta", dtype=torch.float16)
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
        (q, x), (k, y) = make(LENGTHS, 4), make(LENGTHS, 4)
        table = torch.nn.utils.rnn.pad_sequence(q, batch_first=True, padding_value=torch.nan).flatten(0, 1)
        held = JaggedTensor(table, torch.tensor([0, 5, 10, 15]), lengths=torch.tensor(LENGTHS)).transpose(
            1, 2
        )
        keys, values = (held, x) if keys_have_holes else (x, held)
        check(F.scaled_dot_product_attention(y, keys, values), loop(k, q, q), [*q, *k])
    with pytest.raises(ValueError, match="same length"):
        F.scaled_dot_product_attention(x, x, make([5, 1, 3], 4)[1])
    with pytest.raises(ValueError, match="other numbers of rows"):
        F.scaled_dot_product_attention(x, make([2], 4)[1], make([2], 4)[1])


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
@OPTIONS
@pytest.mark.parametrize("other", [[300, 1, 70, 0, 129], [3, 0, 170, 64, 129]], ids=["itself", "other rows"])
def test_on_a_gpu(other, dtype, features, options, door):
    (q, x), (k, y) = (make(n, features, device="cuda", dtype=dtype) for n in ([300, 1, 70, 0, 129], other))
    run = DOORS[door](lambda x, y: F.scaled_dot_product_attention(x, y * 2, y + 1, **options))
    expected = loop(q, [r * 2 for r in k], [r + 1 for r in k], **options)
    check(run(x, y), expected, [*q, *k], **TOLERANCE[dtype])


@pytest.mark.gpu
def test_dropout_on_a_gpu():
    _, x = make([300, 200], 16, device="cuda", dtype=torch.float16)
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
