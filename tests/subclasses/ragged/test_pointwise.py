"""Pointwise ops and what may stand beside a ragged tensor, on both layouts, with a loop over the rows as judge."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from subclasses import DispatchError
from tests.subclasses.ragged.judge import (
    EVERY,
    JAGGED,
    LAYOUTS,
    LENGTHS,
    WAYS,
    alike,
    check_parts,
    desugared,
    eager,
    judge_rows,
    judged,
    make,
    make_batch,
    pairs_of,
    random,
    refused,
    row_dim,
    two_ways,
    ways,
)

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
SCALAR = torch.tensor(1.5, dtype=torch.float64)
ANY = [*JAGGED, "padded"]

test_unary = judged({f.__name__: alike(f) for f in UNARY}, [*pairs_of(ANY), ("padded", desugared)], sweep=6)
test_two_ragged = judged(
    {f.__name__: alike(lambda t, f=f: f(t, t * 2 + 1)) for f in BINARY}, pairs_of(EVERY), sweep=3
)
test_scalars_on_either_side = judged(
    {f.__name__: alike(lambda t, f=f: f(f(t, SCALAR), SCALAR)) for f in BINARY[:6]}, pairs_of(JAGGED)
)


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


def combined(x, p):
    return p * (x * p).tanh() + torch.where(x > 0, p, x)


KEEP = torch.arange(B * T).view(B, T, 1) % 3 > 0

test_dense_operand = judged(
    {
        name: (combined, lambda row, i, p, part=part: combined(row, part(p, i, len(row))), shape)
        for name, (shape, part) in DENSE.items()
    },
    pairs_of(LAYOUTS, WAYS),
    sweep=60,
    width=T,
)
test_others = judged(
    {
        "where": (
            lambda x: torch.where(KEEP, x, 0.0),
            lambda row, i: torch.where(KEEP[i, : len(row)], row, 0.0),
        ),
        "in place": (lambda x: (x * 1).mul_(x), lambda row, _: row * row),
    },
    pairs_of(["back to back", "padded"], [eager, desugared]),
    width=T,
)


@pytest.mark.sweep(6)
@two_ways
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
        return row * part.narrow(row_dim(batch), 0, row.shape[row_dim(batch)]) ** 2

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


# ---- which rows match ------------------------------------------------------------------------------------------


@pytest.mark.sweep(3)
@ways
@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("layouts", [("holes", "back to back"), ("padded", "padded")], ids=str)
def test_rows_that_lie_elsewhere_match(layouts, flipped, way):
    """By their lengths; the extent of the second is greater."""
    a, b = make(layouts[0]), make(layouts[1], width=9)
    b.max_length = 9
    got = way(lambda x, y: y * x if flipped else x * y)(a.x, b.x)
    assert got.shape == (b if flipped else a).x.shape
    check_parts(a, got, [p * q for p, q in zip(a.rows, b.rows, strict=True)], [b.leaf])


@ways
@two
def test_each_call_checks_the_lengths(layout, way):
    a, b, c = make(layout, [3, 1]), make(layout, [3, 1]), make(layout, [1, 3])
    add = way(lambda x, y: x + y)
    for _ in range(2):
        with pytest.raises(
            (RuntimeError, ValueError), match="lengths" if way != eager else r"\[3, 1\] and \[1, 3\]"
        ):
            add(a.x, c.x)
        check_parts(a, add(a.x, b.x), [p + q for p, q in zip(a.rows, b.rows, strict=True)])


test_what_does_not_fit_is_refused = refused(
    {
        "merged": (lambda x: x + x.flatten(0, 1), DispatchError, "Tensor"),
        "a dimension too many": (lambda x: x + x.unsqueeze(-1), DispatchError, "Tensor"),
        "dense, a dimension too many": (lambda x: x + torch.ones(2, *x.shape), DispatchError, "Tensor"),
        "more rows": (lambda x: x + torch.ones(B + 1, 1, D), ValueError, "Tensor"),
        "more positions": (lambda x: x + torch.ones(x.shape[1] + 1, D), ValueError, "Tensor"),
        "fewer rows": (lambda x: x[:2] + x, ValueError, "4 rows and one of 2 rows|2 rows and one of 4 rows"),
    },
    ["back to back", "padded"],
)


# ---- in place, dtypes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ANY)
def test_in_place(layout):
    batch = make(layout)
    x = batch.x.detach()
    expected, (stored, *_) = [row.detach() * 2 + 1 for row in batch.rows], x.unwrap()
    x.mul_(2).add_(1)
    assert x.unwrap()[0].data_ptr() == stored.data_ptr()
    torch.testing.assert_close(x.to_tensors(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.complex64])
def test_dtypes(dtype):
    batch = make_batch()
    x = batch.x.detach().to(dtype)
    assert x.dtype == dtype and x.offsets is batch.x.offsets
    torch.testing.assert_close((x + x).values, batch.leaf.detach().to(dtype) + batch.leaf.detach().to(dtype))
    assert (x + torch.ones(4, dtype=torch.float64)).dtype == torch.promote_types(dtype, torch.float64)
