"""Pointwise ops and what may stand beside a ragged tensor, on both layouts, with a loop over the rows as judge."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from subclasses import DispatchError
from subclasses.ragged import JaggedTensor
from tests.subclasses.ragged.both import (
    EVERY,
    JAGGED,
    LAYOUTS,
    LENGTHS,
    check_parts,
    judge_rows,
    make,
    random,
)
from tests.subclasses.ragged.judge import WAYS, desugared, eager, make_batch

UNARY = [
    torch.neg, torch.exp, torch.tanh, torch.sigmoid, torch.abs, torch.sqrt, torch.square, torch.isnan, torch.sign,
    torch.floor, torch.erf, torch.cos, torch.log1p, torch.reciprocal, torch.logical_not, torch.nan_to_num,
    F.gelu, F.relu, F.silu, F.elu, F.softplus, F.leaky_relu, F.hardswish, F.mish, F.logsigmoid, F.relu6,
]  # fmt: skip
BINARY = [
    torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum, torch.atan2, torch.lt, torch.eq,
    torch.fmod, torch.hypot, torch.logaddexp, torch.copysign, torch.ge, torch.logical_and,
]  # fmt: skip

two = pytest.mark.parametrize("layout", ["back to back", "padded"])
ways = pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("layout", "way"), [*((layout, eager) for layout in [*JAGGED, "padded"]), ("padded", desugared)]
)
@pytest.mark.parametrize("f", UNARY, ids=lambda f: f.__name__)
def test_unary(f, layout, way):
    judge_rows(layout, f, lambda row, _: f(row), way=way)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("layout", EVERY)
@pytest.mark.parametrize("f", BINARY, ids=lambda f: f.__name__)
def test_two_ragged(f, layout):
    judge_rows(layout, lambda x: f(x, x * 2 + 1), lambda row, _: f(row, row * 2 + 1))


@pytest.mark.parametrize("layout", JAGGED)
@pytest.mark.parametrize("f", BINARY[:6], ids=lambda f: f.__name__)
def test_scalars_on_either_side(f, layout):
    scalar = torch.tensor(1.5, dtype=torch.float64)
    judge_rows(layout, lambda x: f(f(x, scalar), scalar), lambda row, _: f(f(row, scalar), scalar))


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


@pytest.mark.sweep(60)
@ways
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dense", DENSE)
def test_dense_operand(dense, layout, way):
    shape, of_row = DENSE[dense]

    def combined(x, p):
        return p * (x * p).tanh() + torch.where(x > 0, p, x)

    judge_rows(
        layout,
        combined,
        lambda row, i, p: combined(row, of_row(p, i, len(row))),
        [random(*shape)],
        way=way,
        width=T,
    )


@pytest.mark.sweep(6)
@pytest.mark.parametrize("way", [eager, desugared], ids=lambda w: w.__name__)
@pytest.mark.parametrize("wide", list(itertools.product([True, False], repeat=4)), ids=str)
@pytest.mark.parametrize("layout", ["[T, B]", "[D, B, T]", "ragged dim 2"])
def test_dense_operand_beside_rows_elsewhere(layout, wide, way):
    """As it is, and without the extents of 1 in front."""
    batch = make(layout, entry=(2, 3))
    full = batch.x.shape
    p = random(*(n if w else 1 for n, w in zip(full, wide, strict=True)))
    fewer = p.shape[list(wide).index(True) if any(wide) else -1 :]

    def of_row(row, i, p):
        part = p.expand(full).select(batch.batch_dim, i)
        dim = batch.ragged_dim - (batch.batch_dim < batch.ragged_dim)
        return row * part.narrow(dim, 0, row.shape[dim]) ** 2

    judge_rows(layout, lambda x, p: x * p * p.view(fewer), of_row, [p], entry=(2, 3), way=way)


@pytest.mark.parametrize("layout", ["back to back", "padded"])
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 3), st.integers(0, 3), st.data())
def test_any_rows_beside_any_broadcast(layout, lengths, features, spare, data):
    b, t = len(lengths), max(lengths) if layout == "back to back" else max(1, max(lengths) + spare)
    shape = [data.draw(st.sampled_from([1, n])) for n in (b, t, features)][data.draw(st.integers(0, 3)) :]
    judge_rows(
        layout,
        lambda x, p: x * p,
        lambda row, i, p: row * p.expand(b, t, features)[i, : len(row)],
        [random(*shape)],
        lengths,
        (features,),
        width=t,
    )


@pytest.mark.parametrize("way", [eager, desugared], ids=lambda w: w.__name__)
@two
def test_a_mask_of_entries_from_a_dense_condition(layout, way):
    keep = torch.rand(B, T, 1) > 0.5
    judge_rows(
        layout,
        lambda x: torch.where(keep, x, 0.0),
        lambda row, i: torch.where(keep[i, : len(row)], row, 0.0),
        way=way,
        width=T,
    )


# ---- which rows match ------------------------------------------------------------------------------------------


@pytest.mark.sweep(3)
@ways
@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("layouts", [("holes", "back to back", None), ("padded", "padded", 9)], ids=str)
def test_rows_that_lie_elsewhere_match(layouts, flipped, way):
    """By their lengths; the second table is wider."""
    a, b = make(layouts[0]), make(layouts[1], width=layouts[2])
    got = way(lambda x, y: y * x if flipped else x * y)(a.x, b.x)
    assert got.shape == (b if flipped else a).x.shape
    check_parts(a, got, [p * q for p, q in zip(a.rows, b.rows, strict=True)], [b.leaf])


def test_the_padded_extent_says_nothing():
    batch = make_batch()
    wider = JaggedTensor(batch.leaf.detach(), batch.offsets.clone(), max_length=9)
    assert (wider + batch.x).shape == (B, 9, D) and (batch.x + wider).shape == (B, T, D)
    (grad,) = torch.autograd.grad((wider * batch.x).unwrap("values").sum(), batch.leaf)
    torch.testing.assert_close(grad, batch.leaf.detach())


@two
def test_other_lengths_are_refused_by_name(layout):
    a, b = make(layout, [3, 1]), make(layout, [2, 2])
    with pytest.raises(ValueError, match=r"\[3, 1\] and \[2, 2\]"):
        a.x + b.x
    with pytest.raises(ValueError, match="2 rows and one of 3 rows"):
        a.x + make(layout, [2, 1, 1]).x


@pytest.mark.parametrize("way", WAYS[1:], ids=lambda w: w.__name__)
@two
def test_a_graph_checks_each_call(layout, way):
    a, b, c = make(layout, [3, 1]), make(layout, [3, 1]), make(layout, [1, 3])
    add = way(lambda x, y: x + y)
    for good in (False, True, False):
        if good:
            check_parts(a, add(a.x, b.x), [p + q for p, q in zip(a.rows, b.rows, strict=True)])
        else:
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


@pytest.mark.parametrize("layout", [*JAGGED, "padded"])
def test_in_place(layout):
    batch, stored = make(layout), "padded" if layout == "padded" else "values"
    expected = [row.detach() * 2 + 1 for row in batch.rows]
    x = batch.x.detach()
    before = getattr(x, stored).data_ptr()
    x.mul_(2).add_(1)
    assert getattr(x, stored).data_ptr() == before
    torch.testing.assert_close(x.to_tensors(), expected)


@two
def test_in_place_under_autograd(layout):
    judge_rows(layout, lambda x: (x * 1).mul_(x), lambda row, _: row * row)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.complex64])
def test_dtypes(dtype):
    batch = make_batch()
    rows = [row.detach().to(dtype) for row in batch.rows]
    x = batch.x.detach().to(dtype)
    assert x.dtype == dtype and x.offsets is batch.x.offsets
    torch.testing.assert_close((x + x).to_tensors(), [row + row for row in rows])
    assert (x + torch.ones(4, dtype=torch.float64)).dtype == torch.promote_types(dtype, torch.float64)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@two
def test_modes(layout, mode):
    batch, p = make(layout, width=T), random(T, 4)
    with mode():
        got = F.linear((batch.x * 2 + p).tanh(), p).mean(1)
        assert not got.requires_grad
        expected = [F.linear((row * 2 + p[: len(row)]).tanh(), p).mean(0) for row in batch.rows]
        torch.testing.assert_close(list(got), expected, equal_nan=True)
