"""Pointwise ops, ops within entries, and what may stand beside rows, with a loop over the rows as judge."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from subclasses import DispatchError
from subclasses.ragged import PaddedTensor
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
    layouts,
    make,
    make_batch,
    pairs_of,
    random,
    refused,
    row_dim,
    same,
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
    x, expected = batch.x.detach(), [row.detach() * 2 + 1 for row in batch.rows]
    place = x.unwrap()[0].data_ptr()
    x.mul_(2).add_(1)
    assert x.unwrap()[0].data_ptr() == place
    torch.testing.assert_close(x.to_tensors(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.complex64])
def test_dtypes(dtype):
    x = make_batch().x.detach()
    y = x.to(dtype)
    assert y.offsets is x.offsets and y.dtype == dtype
    torch.testing.assert_close((y + y).values, x.values.to(dtype) + x.values.to(dtype))
    assert (y + torch.ones(4, dtype=torch.float64)).dtype == torch.promote_types(dtype, torch.float64)


# ==== ops within entries ============================================================================================

PAIRS = pairs_of(LAYOUTS, [eager, desugared])
BIAS = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)


def turned(t):
    """Pairs of features turned by an angle, as rotary embeddings do it with complex numbers."""
    pairs = torch.view_as_complex(t.unflatten(-1, (2, 2)))
    return torch.view_as_real(pairs * (1 + 2j)).flatten(-2)


WITHIN = {
    "glu": (F.glu, F.glu),
    "pad": (lambda x: F.pad(x, (1, 2)), lambda row: F.pad(row, (1, 2))),
    "pad of nothing": (lambda x: F.pad(x, (1, 0, 0, 0, 0, 0)), lambda row: F.pad(row, (1, 0))),
    "flip": (lambda x: x.flip(-1), lambda row: row.flip(-1)),
    "roll": (lambda x: x.roll(1, 2), lambda row: row.roll(1, 1)),
    "flip of rows": (lambda x: x.flip(1, -1), lambda row: row.flip(0, 1)),
    "roll of rows": (lambda x: x.roll(2, 1), lambda row: row.roll(2, 0)),
    "roll back": (lambda x: x.roll((-4, 1), (1, 2)), lambda row: row.roll((-4, 1), (0, 1))),
    "pad of rows": (lambda x: F.pad(x, (1, 0, 2, 1), value=3), lambda row: F.pad(row, (1, 0, 2, 1), value=3)),
    "pad behind": (lambda x: F.pad(x, (0, 0, 0, 2)), lambda row: F.pad(row, (0, 0, 0, 2))),
    "diff": (lambda x: x.diff(), lambda row: row.diff()),
    "diff of rows": (lambda x: x.diff(dim=1), lambda row: row[1:] - row[:-1]),
    "hstack": (lambda x: torch.hstack([x, x * 2]), lambda row: torch.cat([row, row * 2])),
    "complex numbers": (turned, turned),
}


CROPS = {
    f"crop {pad}": alike(lambda t, pad=pad: F.pad(t, (0, 0, *pad))) for pad in [(-1, 0), (0, -1), (-1, 2)]
}

test_within_entries = judged(
    {name: (f, lambda row, _, g=g: g(row)) for name, (f, g) in WITHIN.items()}, PAIRS, sweep=48
)
test_rows_that_are_cropped = judged(CROPS, PAIRS, sweep=12, lengths=[3, 1, 5])
test_rows_that_are_too_short_to_crop = refused(
    {name: (f, RuntimeError, "fewer than the 1 entries") for name, (f, _) in CROPS.items()}
)


PLAIN_ROWS = [torch.randn(n, 4) for n in (3, 1, 2)]
PADDED_BATCH = PaddedTensor.from_tensors(PLAIN_ROWS, batch_multiple=4)
test_rows_that_the_batch_has_not_need_nothing_to_crop = same(
    {
        str(pad): lambda pad=pad: (
            (F.pad(PADDED_BATCH, pad), list(F.pad(PADDED_BATCH, pad).sum(1).shape)),
            ([F.pad(row, pad) for row in PLAIN_ROWS], [4, 4]),
        )
        for pad in ((0, 0, -1, 0), (0, 0, 2, 1))
    }
)

OF_TWO = {
    "complex": lambda x, b: torch.view_as_real(torch.complex(x, x * b) * torch.complex(x, x)),
    "polar": lambda x, b: torch.view_as_real(torch.polar(x.abs() + 1, x * b)),
    "pairwise_distance": lambda x, b: F.pairwise_distance(x, b),
    "cosine_similarity": lambda x, b: F.cosine_similarity(x, x * x + b, -1),
    "linalg.vecdot": lambda x, b: torch.linalg.vecdot(x, x * b),
    "linalg.norm": lambda x, b: torch.linalg.norm(x + b, dim=-1),
}


ALONG_ROWS = {
    "least": (lambda x: torch.aminmax(x, dim=1).min, lambda row, _: torch.aminmax(row, dim=0).min),
    "greatest": (
        lambda x: torch.aminmax(x, dim=2, keepdim=True).max,
        lambda row, _: torch.aminmax(row, dim=1, keepdim=True).max,
    ),
    "cosine_similarity": (
        lambda x, b: F.cosine_similarity(x, x * x + b, 1),
        lambda row, _, b: F.cosine_similarity(row, row * row + b, 0),
        BIAS,
    ),
    "sum_to_size": (
        lambda x, b: (x + b).sum_to_size(len(x), 1, 4)[:, 0],
        lambda row, _, b: (row + b).sum(0),
        BIAS,
    ),
    "addmm": (
        lambda x, b, w: torch.addmm(b, x.flatten(0, 1), w, beta=2, alpha=3).unflatten(0, x.shape[:2]),
        lambda row, _, b, w: torch.addmm(b, row, w, beta=2, alpha=3),
        (6,),
        (4, 6),
    ),
}

test_distances = judged({name: (*alike(f), BIAS) for name, f in OF_TWO.items()}, PAIRS, sweep=24)
test_along_the_rows = judged(ALONG_ROWS, lengths=[3, 5, 1])
test_the_least_and_the_greatest_of_all = judged(
    {name: (lambda t, n=n: torch.aminmax(t)[n],) * 2 for n, name in enumerate(("least", "greatest"))},
    whole=True,
)


@pytest.mark.sweep(2)
@two_ways
@layouts
def test_random_numbers_in_place(layout, way):
    x = make(layout).x.detach()
    for draw in (
        lambda t: t.normal_(5, 0.1),
        lambda t: t.uniform_(4, 6),
        lambda t: t.exponential_() + 1,
        lambda t: F.gumbel_softmax(t) + 1,
    ):
        got = way(lambda x, draw=draw: draw(x * 1))(x)
        assert all(bool((row >= 1).all()) and len(row.unique()) > 1 for row in got.to_tensors() if len(row))
    x[:, 1:].normal_(100)
    assert all(bool((row[:1] < 50).all()) and bool((row[1:] > 50).all()) for row in x.to_tensors())


LOSSES = {
    "margin_ranking": lambda x, how: F.margin_ranking_loss(x, x * x, x.detach().sign(), 0.1, reduction=how),
    "triplet_margin": lambda x, how: F.triplet_margin_loss(x, x * 2, x + BIAS, swap=True, reduction=how),
    "multilabel_soft_margin": lambda x, how: F.multilabel_soft_margin_loss(
        x, (x.detach() > 0).double(), BIAS.detach(), reduction=how
    ),
    "binary_cross_entropy": lambda x, how: F.binary_cross_entropy(
        x.sigmoid(), (x.detach() > 0).double(), reduction=how
    ),
}


def cosine(x):
    return F.cosine_embedding_loss(x, x * x, x.detach().sum(-1).sign(), 0.1, reduction="none")


def multilabel(x):
    return F.multilabel_soft_margin_loss(x, (x.detach() > 0).double(), reduction="none")


test_losses = judged(
    {name: alike(lambda t, f=f: f(t, "none")) for name, f in LOSSES.items()} | {"cosine": alike(cosine)}
)
test_means_of_losses = judged(
    {name: (lambda t, f=f: f(t, "mean"),) * 2 for name, f in LOSSES.items()}, whole=True
)
# The mean over classes that are places of a row is one over what exists.
test_classes_that_are_places = judged(
    {"multilabel": (multilabel, lambda row, _: multilabel(row[None])[0])}, lengths=[3, 5, 1], entry=()
)

# ---- refused ---------------------------------------------------------------------------------------------------


@layouts
def test_a_sum_inside_another_op_is_no_silent_error(layout):
    """Its derivative below the rules would count the padding."""
    x = make(layout).x
    with pytest.raises(NotImplementedError, match="gradient would count entries"):
        torch.trapz(x + BIAS, dim=-1)
    with torch.no_grad():
        got = torch.trapz(x + BIAS, dim=-1)
    expected = [torch.trapz(row + BIAS, dim=-1) for row in x.to_tensors()]
    torch.testing.assert_close(got.to_tensors(), [t.detach() for t in expected])


ALONG = r"ragged along|ragged one|stays|vector norm"
NO_OUT = "not written to an out="
OUT = torch.zeros(0, dtype=torch.float64)

test_what_is_refused = refused(
    {
        "unfold": (lambda x: x.unfold(0, 2, 1), NotImplementedError, ALONG),
        "pad of the batch": (lambda x: F.pad(x, (0, 0, 0, 0, 0, 1)), NotImplementedError, ALONG),
        "reflection": (lambda x: F.pad(x, (0, 1), mode="reflect"), NotImplementedError, ALONG),
        "roll of all": (lambda x: x.roll(1), NotImplementedError, ALONG),
        "flip of merged rows": (lambda x: x.flatten(0, 1).flip(0), NotImplementedError, ALONG),
        "glu of rows": (lambda x: F.glu(x, 1), NotImplementedError, ALONG),
        "nuclear norm": (lambda x: torch.linalg.norm(x, "nuc", (1, 2)), NotImplementedError, ALONG),
        "sum_to_size": (lambda x: x.sum_to_size(3, 4), ValueError, "is no expansion of"),
    }
)
# A dense tensor that is written to would get the size of what is stored.
test_no_dense_tensor_is_written_to = refused(
    {
        "amax": (lambda x: torch.amax(x, -1, out=OUT), NotImplementedError, NO_OUT),
        "max": (lambda x: torch.max(x, 1, out=(OUT, OUT.long())), NotImplementedError, NO_OUT),
        "logsumexp": (lambda x: torch.logsumexp(x, 1, out=OUT), NotImplementedError, NO_OUT),
        "cumsum": (lambda x: torch.cumsum(x, 1, out=OUT), NotImplementedError, NO_OUT),
        "softmax": (lambda x: torch.softmax(x, -1, out=OUT), NotImplementedError, NO_OUT),
        "gather": (lambda x: torch.gather(x, -1, x.argsort(-1), out=OUT), NotImplementedError, NO_OUT),
    },
    lengths=[3, 1],
)
