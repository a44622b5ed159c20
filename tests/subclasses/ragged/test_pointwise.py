"""Pointwise ops and what may stand beside a ragged tensor, with a loop over the rows as judge."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from subclasses import DispatchError
from subclasses.ragged import JaggedTensor
from tests.subclasses.ragged.judge import LAYOUTS, LENGTHS, WAYS, check_rows, desugared, eager, make_batch

UNARY = [
    torch.neg, torch.exp, torch.tanh, torch.sigmoid, torch.abs, torch.sqrt, torch.square, torch.isnan, torch.sign,
    torch.floor, torch.erf, torch.cos, torch.log1p, torch.reciprocal, torch.logical_not, torch.nan_to_num,
    F.gelu, F.relu, F.silu, F.elu, F.softplus, F.leaky_relu, F.hardswish, F.mish, F.logsigmoid, F.relu6,
]  # fmt: skip
BINARY = [
    torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum, torch.atan2, torch.lt, torch.eq,
    torch.fmod, torch.hypot, torch.logaddexp, torch.copysign, torch.ge, torch.logical_and,
]  # fmt: skip


@pytest.mark.sweep(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("f", UNARY, ids=lambda f: f.__name__)
def test_unary(f, layout):
    check_rows(make_batch(layout), f, lambda row, _: f(row))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("f", BINARY, ids=lambda f: f.__name__)
def test_two_ragged(f, layout):
    batch = make_batch(layout)
    check_rows(batch, lambda x: f(x, x * 2 + 1), lambda row, _: f(row, row * 2 + 1))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("f", BINARY[:6], ids=lambda f: f.__name__)
def test_scalars_on_either_side(f, layout):
    batch = make_batch(layout)
    scalar = torch.tensor(1.5, dtype=torch.float64)
    check_rows(batch, lambda x: f(f(x, scalar), scalar), lambda row, _: f(f(row, scalar), scalar))


# ---- dense operands that broadcast -----------------------------------------------------------------------------

B, T, D = len(LENGTHS), max(LENGTHS), 4
# The shape of a dense operand beside [B, T, D], and what of it a row sees.
DENSE = {
    "features": ((D,), lambda p, i, n: p),
    "one": ((1,), lambda p, i, n: p),
    "ones": ((1, 1, D), lambda p, i, n: p[0]),
    "positions": ((T, D), lambda p, i, n: p[:n]),
    "positions, one feature": ((T, 1), lambda p, i, n: p[:n]),
    "positions, as a batch of one": ((1, T, D), lambda p, i, n: p[0, :n]),
    "rows": ((B, 1, D), lambda p, i, n: p[i]),
    "rows, one feature": ((B, 1, 1), lambda p, i, n: p[i]),
    "entries": ((B, T, D), lambda p, i, n: p[i, :n]),
    "entries, one feature": ((B, T, 1), lambda p, i, n: p[i, :n]),
}


def on_row(row, p):
    return p * (row * p).tanh() + torch.where(row > 0, p, row)


@pytest.mark.sweep(72)
@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("layout", ["back to back", "holes"])
@pytest.mark.parametrize("dense", DENSE)
def test_dense_operand(dense, layout, way):
    shape, of_row = DENSE[dense]
    batch, p = make_batch(layout), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    check_rows(
        batch,
        way(lambda x, p: p * (x * p).tanh() + torch.where(x > 0, p, x)),
        lambda row, i, p: on_row(row, of_row(p, i, len(row))),
        [p],
    )


@pytest.mark.sweep(6)
@pytest.mark.parametrize("way", [eager, desugared], ids=lambda w: w.__name__)
@pytest.mark.parametrize(
    "shape", [(D,), (T,), (D, 1), (1, D, T), (B, 1, 1, 1), (B, D, T, 1), (B, 1, T, 3), (B, D, 1, 3)]
)
def test_dense_operand_beside_ragged_dim_2(shape, way):
    batch = make_batch("ragged dim 2", entry=(D, 3))  # [B, D, T, 3]
    shape = (*shape, 1) if len(shape) == 3 and shape[0] == 1 else (1, 3) if shape == (D,) else shape
    shape = (T, 1) if shape == (T,) else shape if shape != (D, 1) else (D, 1, 1)
    p = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def of_row(p, i, n):
        full = p.expand(B, D, T, p.shape[-1])
        return full[i, :, :n]

    check_rows(batch, way(lambda x, p: x * p), lambda row, i, p: row * of_row(p, i, row.shape[1]), [p])


def test_a_mask_of_entries_from_a_dense_condition():
    batch, keep = make_batch(), torch.rand(B, T, 1) > 0.5
    check_rows(
        batch, lambda x: torch.where(keep, x, 0.0), lambda row, i: torch.where(keep[i, : len(row)], row, 0.0)
    )


# ---- which rows match ------------------------------------------------------------------------------------------


def test_rows_match_by_their_lengths():
    a, b = make_batch(), make_batch()
    other = JaggedTensor(b.leaf, b.offsets.clone())
    got = a.x * other
    torch.testing.assert_close(list(got), [p * q for p, q in zip(a.rows, b.rows, strict=True)])


@pytest.mark.sweep(6)
@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("layouts", [("holes", "back to back"), ("back to back", "holes")], ids=" and ".join)
def test_rows_that_lie_elsewhere_match(layouts, way):
    a, b = (make_batch(layout) for layout in layouts)
    got = way(lambda x, y: x * y)(a.x, b.x)
    expected = [p * q for p, q in zip(a.rows, b.rows, strict=True)]
    torch.testing.assert_close(got.to_tensors(), expected)
    weights = [torch.randn_like(e) for e in expected]
    got_grads, expected_grads = (
        torch.autograd.grad(sum((t * w).sum() for t, w in zip(ts, weights, strict=True)), [a.leaf, b.leaf])
        for ts in (got.to_tensors(), expected)
    )
    for batch, grad, wanted in zip((a, b), got_grads, expected_grads, strict=True):
        torch.testing.assert_close(torch.where(batch.leaf.isnan(), 0, grad), wanted)


def test_the_padded_extent_says_nothing():
    batch = make_batch()
    wider = JaggedTensor(batch.leaf.detach(), batch.offsets, max_length=9)
    assert (wider + batch.x).shape == (B, 9, D) and (batch.x + wider).shape == (B, T, D)
    (grad,) = torch.autograd.grad((wider * batch.x).unwrap("values").sum(), batch.leaf)
    torch.testing.assert_close(grad, batch.leaf.detach())


def test_other_lengths_are_refused_by_name():
    a, b = make_batch(lengths=[3, 1]), make_batch(lengths=[2, 2])
    with pytest.raises(ValueError, match=r"\[3, 1\] and \[2, 2\]"):
        a.x + b.x
    with pytest.raises(ValueError, match="2 rows and one of 3 rows"):
        a.x + make_batch(lengths=[2, 1, 1]).x


@pytest.mark.parametrize("way", WAYS[1:], ids=lambda w: w.__name__)
def test_other_lengths_are_refused_in_a_graph(way):
    a, b = make_batch(lengths=[3, 1]), make_batch(lengths=[2, 2])
    add = way(lambda x, y: x + y)
    with pytest.raises((RuntimeError, ValueError), match="lengths"):
        add(a.x, b.x)


def test_a_graph_checks_each_call():
    a, b, c = make_batch(lengths=[3, 1]), make_batch(lengths=[3, 1]), make_batch(lengths=[1, 3])
    for way in WAYS[1:]:
        add = way(lambda x, y: x + y)
        torch.testing.assert_close(add(a.x, b.x).values, a.leaf + b.leaf)
        with pytest.raises((RuntimeError, ValueError), match="lengths"):
            add(a.x, c.x)


@pytest.mark.parametrize(
    ("other", "error"),
    [
        (lambda x: x.flatten(0, 1), DispatchError),
        (lambda x: x.unsqueeze(-1), DispatchError),
        (lambda x: torch.ones(2, B, T, D), DispatchError),
        (lambda x: torch.ones(B + 1, 1, D), ValueError),
        (lambda x: torch.ones(T + 1, D), ValueError),
    ],
)
def test_what_does_not_fit_is_refused(other, error):
    x = make_batch().x
    with pytest.raises(error, match="JaggedTensor"):
        x + other(x)


# ---- in place, dtypes, modes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_place(layout):
    batch = make_batch(layout)
    expected = [row.detach() * 2 + 1 for row in batch.rows]
    x = batch.x.detach()
    before = x.values.data_ptr()
    x.mul_(2).add_(1)
    assert x.values.data_ptr() == before
    torch.testing.assert_close(x.to_tensors(), expected)


def test_in_place_under_autograd():
    batch = make_batch()

    def twice(x):
        y = x * 1
        y.mul_(x)
        return y

    check_rows(batch, twice, lambda row, _: row * row)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.complex64])
def test_dtypes(dtype):
    batch = make_batch()
    rows = [row.detach().to(dtype) for row in batch.rows]
    x = batch.x.detach().to(dtype)
    assert x.dtype == dtype and x.offsets is batch.x.offsets
    torch.testing.assert_close((x + x).to_tensors(), [row + row for row in rows])
    assert (x + torch.ones(4, dtype=torch.float64)).dtype == torch.promote_types(dtype, torch.float64)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes(mode):
    batch = make_batch()
    with mode():
        got = (batch.x * 2 + torch.ones(T, D)).tanh()
        assert not got.requires_grad
        torch.testing.assert_close(list(got), [(row * 2 + 1).tanh() for row in batch.rows])


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 3), st.data())
def test_any_rows_beside_any_broadcast(lengths, features, data):
    b, t = len(lengths), max(lengths)
    shape = [data.draw(st.sampled_from([1, n])) for n in (b, t, features)][data.draw(st.integers(0, 2)) :]
    batch = make_batch(lengths=lengths, entry=(features,))
    p = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    check_rows(
        batch, lambda x, p: x * p, lambda row, i, p: row * p.expand(b, t, features)[i, : len(row)], [p]
    )
