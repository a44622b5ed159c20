"""Padded tensors: construction, conversion, merged dimensions, the widths of tables, and refused calls."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from subclasses import DispatchError
from subclasses.ragged import PaddedTensor, kernel_multiple, propose_buckets
from subclasses.ragged.padded.buckets import bucket_of
from tests.subclasses.ragged.judge import (
    LENGTHS,
    PLACES,
    WAYS,
    alike,
    judge_rows,
    judged,
    judged_by_rows,
    make_table,
    pairs_of,
    random,
    refused,
    same,
    ways,
)
from tests.tables import giving, raising

# ---- making and converting -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "width"), [({}, 5), ({"multiple": 4}, 8), ({"buckets": [16, 4, 6]}, 6), ({"multiple": 5}, 5)]
)
def test_from_tensors(options, width):
    rows = [torch.randn(n, 2, dtype=torch.float64, requires_grad=True) for n in LENGTHS]
    x = PaddedTensor.from_tensors(rows, **options)
    assert x.shape == (4, width, 2) and x.row_lengths().tolist() == LENGTHS
    torch.testing.assert_close(x.to_tensors(), rows)
    weights = torch.randn(4, width, 2, dtype=torch.float64)
    grads = torch.autograd.grad((x.to_dense() * weights).sum(), rows)
    torch.testing.assert_close(grads, tuple(w[:n] for w, n in zip(weights, LENGTHS, strict=True)))


@pytest.mark.parametrize(("dim", "batch"), [(0, 1), (1, 0), (-1, 0)])
def test_pad(dim, batch):
    plain = torch.randn(3, 5, 6, requires_grad=True)
    x, length = PaddedTensor.pad(plain, dim=dim, multiple=4), plain.shape[dim]
    assert (x.batch_dim, x.ragged_dim, x.shape[dim]) == (batch, dim % 3, -(-length // 4) * 4)
    assert x.row_lengths().tolist() == [length] * plain.shape[batch]
    torch.testing.assert_close(torch.stack(x.to_tensors(), batch), plain)
    assert (torch.autograd.grad(x.sum(), plain)[0] == 1).all()


def gave_back(f):
    """A function of tables that gives the same rows."""
    return f, lambda rows: rows


test_round_trips = judged_by_rows(
    {
        "the table": gave_back(lambda x: x),
        "wider": gave_back(lambda x: x.to_padded(multiple=8)),
        "rows": gave_back(lambda x: x.to_jagged().to_tensors()),
        "jagged and padded": gave_back(lambda x: x.to_jagged().to_padded(multiple=16)),
    },
    pairs_of(PLACES),
)


@pytest.mark.parametrize("places", PLACES)
def test_masks_and_dense_tensors(places):
    table = make_table(places)
    mask, dense = table.x.mask(), table.x.to_dense(fill=9.0)
    assert table.x.to_padded(multiple=8).shape[table.ragged_dim] == 8
    assert mask.shape == (4, 7) and mask.sum(1).tolist() == LENGTHS
    assert not dense.isnan().any() and int((dense == 9).sum()) == int((~mask).sum()) * 4
    assert torch.autograd.gradcheck(lambda t: table.x.with_padded(t).to_dense(),
                                    [torch.nan_to_num(table.leaf.detach()).requires_grad_()])  # fmt: skip


COPIED = make_table().x
test_copies_keep_the_lengths = giving(
    {
        name: (
            lambda f=f: (f(COPIED).lengths is COPIED.lengths, f(COPIED).shape),
            (True, COPIED.shape),
        )
        for name, f in {
            "detach": lambda x: x.detach(),
            "clone": lambda x: x.clone(),
            "zeros_like": torch.zeros_like,
            "to": lambda x: x.to(torch.float32),
            "float and double": lambda x: x.float().double(),
            "contiguous": lambda x: x.contiguous(),
        }.items()
    }
)


NO_ROWS = PaddedTensor(torch.ones(0, 4, 2), torch.zeros(0, dtype=torch.int64))
NO_ENTRIES = PaddedTensor(torch.ones(2, 0, 3), torch.zeros(2, dtype=torch.int64))

test_no_rows_and_no_entries = giving(
    {
        "a sum of no rows": (lambda: (NO_ROWS * 2).sum(), 0),
        "sums of no rows": (lambda: NO_ROWS.sum(1).shape, (0, 2)),
        "no rows as tensors": (lambda: NO_ROWS.to_tensors(), []),
        "a sum of no entries": (lambda: NO_ENTRIES.sum(), 0),
        "a mean of no entries": (lambda: NO_ENTRIES.mean().isnan(), True),
        "softmax of no entries": (lambda: NO_ENTRIES.softmax(1).shape, (2, 0, 3)),
        "a multiple of nothing": (
            lambda: PaddedTensor.from_tensors([torch.ones(0)], multiple=8).shape,
            (1, 8),
        ),
    }
)


# ---- refusing --------------------------------------------------------------------------------------------------


T, N = torch.ones(2, 4, 3), torch.tensor([1, 2])
test_wrong_parts = raising(
    [
        (lambda: PaddedTensor(T, N[:1]), ValueError, r"expected shape \[2\]"),
        (lambda: PaddedTensor(T, N, ragged_dim=0), ValueError, "both 0"),
        (lambda: PaddedTensor(T, N, ragged_dim=3), ValueError, "ragged_dim"),
        (lambda: PaddedTensor(T, N, batch_dim="x"), ValueError, "batch_dim"),
        (lambda: PaddedTensor(T, N + 9).to_tensors(), ValueError, "from 0 to 4"),
        (lambda: PaddedTensor.from_tensors([]), ValueError, "at least one row"),
        (lambda: PaddedTensor.from_tensors([T, T[:, :1]]), ValueError, "row 1"),
        (lambda: PaddedTensor.from_tensors([T], multiple=2, buckets=[2]), ValueError, "both"),
        (lambda: PaddedTensor.from_tensors([T], buckets=[1]), ValueError, "none of"),
        (lambda: PaddedTensor.from_tensors([T], multiple=0), ValueError, "at least 1"),
        (lambda: PaddedTensor.pad(T[0, 0], dim=0), ValueError, "two dimensions"),
        (lambda: PaddedTensor.pad(T, dim=3), ValueError, "expected a dimension"),
        (lambda: PaddedTensor(T, N.int()), ValueError, r"lengths: expected dtype torch\.int64"),
        (lambda: PaddedTensor(T, [1, 2]), TypeError, "lengths"),
        (lambda: PaddedTensor.from_tensors(T), TypeError, "list of tensors"),
    ]
)

REFUSED = [
    lambda x: x.unsqueeze(-1) @ x.unsqueeze(1).expand(-1, 1, -1, -1),
    lambda x: x.transpose(0, 1).flatten(0, 1),
    lambda x: x.flatten(0, 2),
    lambda x: x.flatten(0, 1).sort(0),
    lambda x: x.flatten(0, 1).argmax(0),
    lambda x: x.unfold(0, 2, 1),
    lambda x: torch.cat([x, x.transpose(0, 1)], 0),
    lambda x: torch.cat([x, x[:2]], 1),
    lambda x: x.expand(4, 9, 4),
    lambda x: torch.ones(4, 7, 4, dtype=torch.float64).add_(x),
    lambda x: F.layer_norm(x.transpose(1, 2), (7,)),
    lambda x: F.linear(x.mT, torch.ones(2, 7, dtype=torch.float64)),
    lambda x: F.cross_entropy(x, torch.zeros(4, 7, dtype=torch.int64)),
    lambda x: torch.ones(2, 4, 7, dtype=torch.float64) @ x,
    lambda x: x.argmax(),
    lambda x: x + x.to_jagged(),
]

test_what_has_no_rule_is_refused = refused(
    {f"{n}": (f, (DispatchError, ValueError), r"Padded|lengths") for n, f in enumerate(REFUSED)}
    | {"mode": (lambda x: x.mode(), DispatchError, r"no rule for aten\.mode.*use x\.to_dense\(fill\)")},
    ["padded"],
)


# ==== merged dimensions and padded batches ==========================================================================

# ---- merging and unmerging -------------------------------------------------------------------------------------

MERGES = {  # of [4, 7, 6], and back
    "flatten": (lambda x: x.flatten(0, 1), lambda m: m.unflatten(0, (4, 7))),
    "view": (lambda x: x.view(-1, 6), lambda m: m.view(4, 7, 6)),
    "reshape": (lambda x: x.reshape(28, -1), lambda m: m.reshape(4, -1, 6)),
    "features too": (lambda x: x.view(-1, 2, 3), lambda m: m.view(4, 7, 2, 3).flatten(2)),
    "unflatten -1": (lambda x: x.flatten(0, 1), lambda m: m.unflatten(0, (-1, 7))),
    "a dimension in front": (lambda x: x.unsqueeze(0).flatten(1, 2), lambda m: m.unflatten(1, (4, 7)).squeeze(0)),
    "resized": (lambda x: x.flatten(0, 1).unflatten(1, (2, 3)).transpose(1, 2).flatten(1),
                lambda m: m.view(4, 7, 3, 2).transpose(2, 3).flatten(2)),
}  # fmt: skip


test_it_unmerges_to_the_same_rows = judged(
    {
        name: (lambda x, f=f, g=g: g(f(x).tanh()), lambda row, _: row.tanh())
        for name, (f, g) in MERGES.items()
    },
    pairs_of(["padded"], WAYS),
    sweep=24,
    entry=(6,),
)


@pytest.mark.parametrize("name", MERGES)
def test_a_merged_view_shares_lengths_and_memory(name):
    merge, unmerge = MERGES[name]
    x = make_table(entry=(6,)).x.detach()
    m = merge(x)
    assert m.merged and m.lengths is x.lengths and unmerge(m).shape == x.shape
    if name in ("flatten", "view", "features too"):
        assert m._is_view()
        m.zero_()
        assert all((row == 0).all() for row in x.to_tensors())


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 3, 1), (2, 1, 1), (2, 1, 4), (1, 3, 4), (3, 0, 2), (0, 3, 2)]
)
def test_small_extents(shape):
    b, t, d = shape
    x = PaddedTensor(torch.ones(shape), torch.full((b,), t))
    m = x.flatten(0, 1)
    assert m.merged and m.shape == (b * t, d) and m.unflatten(0, (b, t)).shape == shape
    if b:
        judge_rows(
            "padded", lambda x: x.flatten(0, 1) * 2, lambda row, _: row * 2, (), [t] * b, (d,), width=t
        )


MERGED_OPS = {  # of [N, 6], and of all entries as one plain tensor
    "sum": (lambda m: m.sum(0), lambda e: e.sum(0)),
    "mean": (lambda m: m.mean(0), lambda e: e.mean(0)),
    "mean of all": (lambda m: m.mean(), lambda e: e.mean()),
    "var": (lambda m: m.var(0), lambda e: e.var(0)),
    "std of all": (lambda m: m.std(), lambda e: e.std()),
    "amax": (lambda m: m.amax(0), lambda e: e.amax(0)),
    "logsumexp": (lambda m: m.logsumexp(0), lambda e: e.logsumexp(0)),
    "norm": (lambda m: torch.linalg.vector_norm(m), lambda e: torch.linalg.vector_norm(e)),
    "softmax": (lambda m: (m.softmax(0) * m).sum(0), lambda e: (e.softmax(0) * e).sum(0)),
    "cumsum": (lambda m: (m.cumsum(0) * m).sum(0), lambda e: (e.cumsum(0) * e).sum(0)),
    "mse": (lambda m: F.mse_loss(m, m.tanh()), lambda e: F.mse_loss(e, e.tanh())),
}


OF_TABLES = {"product": (lambda m: m.mT @ m.tanh(), lambda e: e.mT @ e.tanh())}
test_merged_entries_are_counted, test_merged_entries_of_a_table = (
    judged(
        {name: (lambda x, f=f: f(x.flatten(0, 1)), g) for name, (f, g) in ops.items()},
        pairs_of(layouts, WAYS),
        sweep=24,
        entry=(6,),
        whole=True,
    )
    for ops, layouts in ((MERGED_OPS, ["holes", "padded"]), (OF_TABLES, ["padded"]))
)


def layers(t, w, b, g):
    m = F.linear(t.reshape(-1, 6), w, b) + t.reshape(-1, 6) @ w.mT
    return F.layer_norm(F.gelu(m), (5,), g, b).view(*t.shape[:-1], 5)


test_layers_of_merged_entries = judged(
    {"layers": (*alike(layers), (5, 6), (5,), (5,))}, pairs_of(["padded"], WAYS), sweep=3, entry=(6,)
)


SHORT, OTHER = (make_table(lengths=lengths).x.flatten(0, 1) for lengths in ([3, 1], [1, 3]))
WIDER = make_table(lengths=[3, 1], width=9)
test_other_rows_do_not_mix = raising(
    {"other rows": (lambda: SHORT + OTHER, ValueError, r"\[3, 1\] and \[1, 3\]")}
)


# ---- padded batches --------------------------------------------------------------------------------------------


def padded_batch(lengths=(3, 2, 5), multiple=4):
    """A table with a row that the batch has not, all padding NaN, and the plain rows."""
    rows = [random(n, 6) for n in lengths]
    x = PaddedTensor.from_tensors(rows, multiple=7, batch_multiple=multiple)
    return rows, x.with_padded(x.to_dense(fill=float("nan")))


PER_ROW = {
    "sum": lambda t, d: t.sum(d),
    "mean": lambda t, d: t.mean(d),
    "var": lambda t, d: t.var(d),
    "amax": lambda t, d: t.amax(d),
    "max": lambda t, d: t.max(d)[0],
    "logsumexp": lambda t, d: t.logsumexp(d),
    "norm": lambda t, d: torch.linalg.vector_norm(t, dim=d),
    "prod": lambda t, d: t.prod(d),
    "all of it": lambda t, d: t.sum((d, d + 1)),
    "last": lambda t, d: t.select(d, -1),
    "centred": lambda t, d: ((t - t.mean(d, keepdim=True)) * t).sum(d),
    "product": lambda t, d: t.mT @ t,
}


def check_batch(got, rows, expected):
    """Values, and gradients of the rows under a cotangent that is NaN where there is no row."""
    (entries,) = got.to_tensors()
    assert got.merged and got.shape[0] == 4 and entries.shape[0] == 3
    torch.testing.assert_close(entries, expected)
    cotangent = torch.full_like(got.padded, float("nan"))
    cotangent[:3] = weights = torch.randn_like(expected)
    ours = torch.autograd.grad(got, rows, got.detach().with_padded(cotangent))
    torch.testing.assert_close(ours, torch.autograd.grad(expected, rows, weights))


@pytest.mark.sweep(30)
@pytest.mark.parametrize("name", PER_ROW)
@ways
def test_a_reduction_keeps_the_batch(name, way):
    f = PER_ROW[name]
    rows, x = padded_batch()
    check_batch(way(lambda x: f(x, 1))(x), rows, torch.stack([f(row, 0) for row in rows]))


def classify(pooled, w):
    """Pooled entries go on: the mean over the batch divides by the rows that it has."""
    y = torch.tensor([0, 2, 1, 10**9])[: len(pooled)]
    pooled = F.layer_norm(pooled, (6,))
    return F.cross_entropy(F.linear(pooled, w), y) + pooled.square().mean() + pooled.softmax(0).amax()


@pytest.mark.sweep(3)
@ways
def test_a_classifier_over_a_padded_batch(way):
    rows, x = padded_batch()
    w = random(3, 6)
    got = way(lambda x, w: classify(x.tanh().mean(1), w))(x, w)
    expected = classify(torch.stack([row.tanh().mean(0) for row in rows]), w)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, [*rows, w]) for loss in (got, expected)))


def divergences(rows, x):
    """Of a padded batch of three rows with ten entries, and its merged entries."""
    p = x.detach().tanh().exp()
    total = sum(F.kl_div(row, row.detach().tanh().exp(), reduction="sum") for row in rows)
    found = [F.kl_div(*pair, reduction="batchmean") for pair in ((x, p), (x.flatten(0, 1), p.flatten(0, 1)))]
    return found, [total / 3, total / 10]


def beside_a_dense_operand(rows, x):
    per_row, everywhere = random(4, 1, 1), random(4, 7, 6)
    got = (x * per_row + everywhere).square().mean()
    parts = [row * per_row[i] + everywhere[i, : len(row)] for i, row in enumerate(rows)]
    losses = got, torch.cat(parts).square().mean()
    return [torch.autograd.grad(loss, [*rows, per_row, everywhere]) for loss in losses]


PLAIN = PaddedTensor.from_tensors([torch.ones(2), torch.ones(1)], batch_multiple=2)
LONGER = torch.ones(4, 6, dtype=torch.float64)
test_what_a_padded_batch_gives = same(
    {
        "merged entries beside those of a wider table": lambda: (
            SHORT + WIDER.x.flatten(0, 1),
            [p + q for p, q in zip(SHORT.to_tensors(), WIDER.rows, strict=True)],
        ),
        "divergences": lambda: divergences(*padded_batch()),
        "a dense operand": lambda: beside_a_dense_operand(*padded_batch()),
        "all conversions": lambda: (
            lambda rows, x: ([x, list(x), x.to_jagged(), x.flatten(0, 1)], [rows] * 4)
        )(*padded_batch()),
        "slices": lambda: (lambda rows, x: ([x[1:], x[:2], x[3:]], [rows[1:], rows[:2], []]))(
            *padded_batch()
        ),
        "rows that grow": lambda: (padded_batch()[1].append(LONGER).row_lengths().tolist(), [4, 3, 6, 0]),
        "a conversion keeps the number of rows": lambda: (
            (lambda x: x.to(torch.float32).row_count is x.row_count)(padded_batch()[1]),
            True,
        ),
        "a mean": lambda: (PLAIN.mean(1).mean(), torch.tensor(1.0)),
        "a batch of the right size": lambda: (list(PLAIN.shape), [2, 2]),
    }
)


test_what_a_padded_batch_refuses = raising(
    {
        "a row": (lambda: padded_batch()[1][3], IndexError, "out of bounds for the 3 rows of the batch"),
        "rows by a list": (lambda: padded_batch()[1][[0, 1]], DispatchError, "taken by slices"),
        "a number of rows": (
            lambda: PaddedTensor(PLAIN.padded, PLAIN.lengths, row_count=PLAIN.lengths[0]),
            ValueError,
            "row_count: expected shape",
        ),
    }
)

# ==== widths of tables ==============================================================================================


@given(st.integers(0, 1000), st.integers(1, 20))
def test_the_least_width_that_holds_a_row(length, multiple):
    width, power = bucket_of(length, multiple), bucket_of(length, buckets="powers")
    assert width % multiple == 0 and width >= length and width - multiple < max(length, 1)
    assert power.bit_count() == 1 and power >= length and (power == 1 or power // 2 < length)


def by_length(lengths, buckets):
    """Rows of other lengths, and the tables of them."""
    rows = [torch.randn(n, 3, requires_grad=True) for n in lengths]
    return rows, PaddedTensor.by_length(rows, buckets)


def gradients_of_tables(rows, tables):
    total = sum(table.square().sum() for _, table in tables)
    return torch.autograd.grad(total, rows), [2 * row for row in rows]


def sums_in_order(rows, tables):
    """Results lead back to the order of the rows."""
    sums = torch.cat([table.sum(1) for _, table in tables])
    order = torch.cat([numbers for numbers, _ in tables]).argsort()
    return sums[order], torch.stack([row.sum(0) for row in rows])


POWERS = PaddedTensor.from_tensors([torch.ones(5), torch.ones(2)], buckets="powers")
test_widths_and_tables = same(
    {
        "powers": lambda: (list(POWERS.shape), [2, 8]),
        "powers of a jagged tensor": lambda: (
            list(POWERS.to_jagged().to_padded(buckets="powers").shape),
            [2, 8],
        ),
        "multiples of kernels": lambda: (
            [
                *(kernel_multiple(dtype, "cuda") for dtype in (torch.float16, torch.int8)),
                *(kernel_multiple(dtype) for dtype in (torch.float32, torch.bfloat16)),
            ],
            [8, 16, 16, 32],
        ),
        "gradients": lambda: gradients_of_tables(*by_length((2, 30, 0, 7), "powers")),
        "sums": lambda: sums_in_order(*by_length((2, 30, 1, 7, 9), [8, 32])),
    }
)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 4), st.sampled_from([1, 4, 8]))
def test_proposed_buckets_pad_least(lengths, programs, multiple):
    buckets = propose_buckets(lengths, programs=programs, multiple=multiple)

    def places(buckets):
        return sum(bucket_of(n, buckets=buckets) for n in lengths)

    assert buckets == sorted(set(buckets)) and len(buckets) <= programs
    assert all(b % multiple == 0 for b in buckets)
    widths = sorted({bucket_of(n, multiple) for n in lengths})
    every = (
        c for k in range(1, programs + 1) for c in itertools.combinations(widths, k) if c[-1] == widths[-1]
    )
    assert places(buckets) == min(map(places, every))


test_what_is_refused = raising(
    {
        "primes": (
            lambda: PaddedTensor.from_tensors([torch.ones(5)], buckets="primes"),  # type: ignore[arg-type]
            ValueError,
            "or 'powers', got 'primes'",
        ),
        "no programs": (lambda: propose_buckets([3], programs=0), ValueError, "at least 1, got 0"),
        "not a multiple": (lambda: propose_buckets([3], multiple=0), ValueError, "at least 1, got 0"),
        "no lengths": (lambda: propose_buckets([]), ValueError, "one length or more"),
        "a row that fits nowhere": (
            lambda: PaddedTensor.by_length([torch.ones(9, 1)], [4, 8]),
            ValueError,
            "fits into none of",
        ),
        "no rows": (lambda: PaddedTensor.by_length([], [4]), ValueError, "at least one row"),
    }
)


# ---- tables by length ----------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12))
def test_rows_sorted_into_tables_are_those_rows(lengths):
    rows = [torch.full((n, 2), float(number)) for number, n in enumerate(lengths)]
    tables = PaddedTensor.by_length(rows, [8, 16, 64])
    seen = [number for numbers, _ in tables for number in numbers.tolist()]
    assert sorted(seen) == list(range(len(rows)))
    widths = [table.shape[1] for _, table in tables]
    assert widths == sorted(set(widths)) and set(widths) <= {8, 16, 64}
    for numbers, table in tables:
        for number, row in zip(numbers.tolist(), table.to_tensors(), strict=True):
            assert torch.equal(row, rows[number])
            assert bucket_of(len(row), buckets=[8, 16, 64]) == table.shape[1]
