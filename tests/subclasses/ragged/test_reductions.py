"""Reductions, order statistics and ``torch.masked``, on both layouts, with a loop over the rows as judge."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor

from subclasses import DispatchError
from subclasses.ragged import JaggedTensor, PaddedTensor
from subclasses.ragged.segments import Segments
from tests.subclasses.ragged.judge import (
    JAGGED,
    LAYOUTS,
    WAYS,
    alike,
    along,
    check_parts,
    classes,
    desugared,
    eager,
    hold,
    judged,
    layouts,
    make,
    make_batch,
    pairs_of,
    refused,
    row_dim,
    same,
    stock,
    ways,
)
from tests.tables import giving

# The judge warns where a row is too short for a variance; ours is NaN as well.
pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")

SUMS = [torch.sum, torch.mean, torch.var, torch.std, torch.logsumexp, torch.linalg.vector_norm, torch.nansum]
DISCRETE = [torch.any, torch.all, torch.count_nonzero]
EXTREMA = [torch.amax, torch.amin]
DIMS = [d for n in (1, 2, 3) for d in itertools.combinations(range(3), n)]
FULL = [3, 7, 1]  # no row is empty, one fills the table

ANY = [*JAGGED, "padded"]
PAIRS = [*pairs_of(ANY), ("padded", desugared)]


def positions_of(rows: list[Tensor]) -> list[Tensor]:
    """For each position the entries of the rows that reach it: ``[rows, ...]``."""
    return [torch.stack([row[t] for row in rows if len(row) > t]) for t in range(max(map(len, rows)))]


def judge(batch, f, dims, keepdim, way=eager) -> None:
    """``f(t, dims, keepdim)`` by loops: over rows, positions, or all entries, as the dimensions say."""
    got = way(lambda x: f(x, dims, keepdim))(batch.x)
    rows, merged = batch.rows, (0, 1) if 2 in dims else (0,)
    if 0 not in dims:
        assert 1 in dims or not keepdim or got.shape[:2] == batch.x.shape[:2]
        check_parts(batch, got, [f(row, tuple(d - 1 for d in dims), keepdim) for row in rows])
    elif 1 in dims:
        expected = f(torch.cat(rows), merged, keepdim)
        check_parts(batch, [got], [expected.unsqueeze(0) if keepdim else expected])
    else:
        place = 1 if keepdim else 0
        assert got.shape[place] == batch.x.shape[1]
        expected = torch.stack([f(p, merged, keepdim) for p in positions_of(rows)], place)
        check_parts(batch, [got.narrow(place, 0, expected.shape[place])], [expected])


@pytest.mark.sweep(9)
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("f", [*SUMS, *EXTREMA])
@pytest.mark.parametrize(
    ("layout", "way"),
    [*pairs_of([*LAYOUTS, "not contiguous"]), ("padded", desugared), *pairs_of(["back to back"], WAYS[1:])],
)
def test_sums_and_extrema(layout, way, f, dims, keepdim):
    batch = make(layout, FULL) if f in EXTREMA else make(layout)
    judge(batch, lambda t, d, k: f(t, dim=d, keepdim=k), dims, keepdim, way)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("f", DISCRETE)
def test_discrete(f, dims, dtype):
    batch = make_batch(dtype=torch.int64)
    batch.leaf = (batch.leaf % 3).to(dtype)
    judge(batch, lambda t, d, k: f(t, dim=d), dims, False)


@pytest.mark.parametrize("fill", [0, 7])
@pytest.mark.parametrize("f", DISCRETE)
def test_discrete_beside_any_padding(f, fill):
    rows = [torch.randint(0, 2, (3, 4)), torch.zeros(0, 4, dtype=torch.int64)]
    x = PaddedTensor.from_tensors(rows, multiple=5)
    x = x.with_padded(x.to_dense(fill=fill))
    assert torch.equal(f(x, dim=1), torch.stack([f(row, dim=0) for row in rows]))
    assert torch.equal(f(x), f(rows[0]))


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (3,), (1, 3), (2, 3), (3, 1)], ids=str)
@pytest.mark.parametrize(
    "f",
    [torch.sum, torch.mean, torch.var, torch.amax, torch.logsumexp],
)
@pytest.mark.parametrize("layout", ["ragged dim 2", "[T, B]", "[D, B, T]"])
def test_rows_elsewhere(layout, f, dims):
    batch = make(layout, FULL, (2, 3))
    b, place = batch.batch_dim, row_dim(batch)
    if b not in dims:
        for keepdim in (False, True):
            got = f(batch.x, dims, keepdim=keepdim)
            got = got.unbind(b - (not keepdim) * sum(d < b for d in dims)) if type(got) is Tensor else got
            of_row = tuple(d - (b < d) for d in dims)
            check_parts(batch, got, [f(row, of_row, keepdim=keepdim) for row in batch.rows])
    elif len(dims) == 1:
        positions = positions_of([row.movedim(place, 0) for row in batch.rows])
        check_parts(batch, [f(batch.x, dims)], [torch.stack([f(p, 0) for p in positions], place)])


test_all_entries = judged(
    {
        **{
            f.__name__: (f, lambda entries, f=f: f(entries.flatten()))
            for f in (
                torch.sum,
                torch.mean,
                torch.var,
                torch.amax,
                torch.max,
                torch.nansum,
                torch.prod,
                torch.norm,
            )
        },
        "another norm": (lambda x: x.norm(p=1), lambda entries: entries.norm(p=1)),
    },
    PAIRS,
    sweep=2,
    whole=True,
)

PICKED = {
    "max": lambda t, d: t.max(d)[0],
    "place of max": lambda t, d: t.max(d)[1],
    "min": lambda t, d: t.min(d)[0],
    "place of min": lambda t, d: t.min(d)[1],
    "argmax": lambda t, d: t.argmax(d),
    "argmin": lambda t, d: t.argmin(d),
    "norm": lambda t, d: torch.norm(t, 2, d),
    "values of var_mean": lambda t, d: torch.var_mean(t, d)[0],
    "means of var_mean": lambda t, d: torch.var_mean(t, d, correction=0)[1],
    "values of std_mean": lambda t, d: torch.std_mean(t, d, unbiased=False)[0],
    "means of std_mean": lambda t, d: torch.std_mean(t, d, keepdim=True)[1],
    "wide var_mean": lambda t, d: torch.var_mean(t, d, keepdim=True)[0],
}

test_extrema_with_indices_and_two_at_once = judged(
    {f"{name}, {dim}": along(f, dim) for name, f in PICKED.items() for dim in (1, 2)},
    pairs_of(["holes", "padded"], [eager, desugared]),
    sweep=4,
    lengths=FULL,
)

test_what_is_refused = refused(
    {
        **{
            f.__name__: (
                lambda x, f=f: f(x, 1),
                (IndexError, RuntimeError),
                r"no entries in rows \[1\]|has no entries",
            )
            for f in (torch.amax, torch.amin, torch.argmax)
        },
        **{
            f"dimension {dim}": (
                lambda x, dim=dim: x.sum(dim),
                IndexError,
                r"distinct dimensions of a (Jagged|Padded)T",
            )
            for dim in (3, -4, (0, 0))
        },
    },
    ["back to back", "padded"],
)


# ---- dtypes ----------------------------------------------------------------------------------------------------


FULL_OF_ONES = JaggedTensor.from_tensors([torch.ones(4096, 1, dtype=torch.bfloat16)])
test_half_precision_and_dtype = giving(
    {
        "a sum": (lambda: FULL_OF_ONES.sum(1).item(), 4096),
        "its dtype": (lambda: FULL_OF_ONES.sum(1).dtype, torch.bfloat16),
        "a given one": (lambda: FULL_OF_ONES.sum(dtype=torch.float64).dtype, torch.float64),
    }
)


@classes
@pytest.mark.parametrize("f", [torch.mean, torch.var, torch.std])
def test_half_precision_does_not_overflow(f, cls):
    rows = [(torch.rand(n, 2) * 200 + 200).half() for n in (500, 3)]
    got = f(cls.from_tensors(rows), 1)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got, torch.stack([f(row, 0) for row in rows]), rtol=2e-3, atol=1e-2)


INTEGERS = {
    "logsumexp": lambda t, d: t.logsumexp(d),
    "softmax": lambda t, d: t.softmax(d, dtype=torch.float64).sum(d),
    "log_softmax": lambda t, d: t.log_softmax(d, dtype=torch.float64).sum(d),
    "cumsum": lambda t, d: t.cumsum(d, dtype=torch.float64).sum(d),
}


@classes
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", INTEGERS)
def test_the_least_integer_counts(name, dtype, cls):
    """So none of them stands for what does not exist."""
    if dtype.is_complex and name != "logsumexp":
        pytest.skip("PyTorch has none")
    f, rows = INTEGERS[name], [torch.randint(0, 4, (n, 2)).to(dtype) for n in (3, 1, 2)]
    torch.testing.assert_close(list(f(cls.from_tensors(rows), 1)), [f(row, 0) for row in rows])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.sampled_from(DIMS), st.booleans())
def test_any_rows(lengths, dims, keepdim):
    if max(lengths):
        judge(make_batch("holes", lengths), lambda t, d, k: t.sum(d, keepdim=k), dims, keepdim)


# ---- along a dimension -----------------------------------------------------------------------------------------

ALONG = {
    "softmax": lambda t, d: t.softmax(d),
    "log_softmax": lambda t, d: torch.log_softmax(t, d),
    "cumsum": lambda t, d: t.cumsum(d),
    "cumprod": lambda t, d: torch.cumprod(t, dim=d),
    "logcumsumexp": lambda t, d: t.logcumsumexp(d),
    "cummax": lambda t, d: t.cummax(d)[0],
    "cummin": lambda t, d: t.cummin(d)[1],
    "sort": lambda t, d: t.sort(d)[0],
    "sort descending": lambda t, d: t.sort(d, descending=True)[0],
    "argsort": lambda t, d: t.argsort(d),
}

test_along_a_dimension = judged(
    {f"{name}, {dim}": along(f, dim) for name, f in ALONG.items() for dim in (1, 2)},
    [*PAIRS, *pairs_of(["holes"], WAYS[1:])],
    sweep=8,
)


@layouts
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("descending", [False, True])
def test_extreme_entries_sort_before_what_does_not_exist(descending, part, layout):
    inf, nan = float("inf"), float("nan")
    rows = [torch.tensor(row) for row in ([1.0, nan, -inf, inf], [-inf], [inf, inf, nan], [])]
    got = hold(layout, rows).sort(1, descending=descending)[part].to_tensors()
    wanted = [row.sort(dim=0, descending=descending, stable=True)[part] for row in rows]
    torch.testing.assert_close(got, wanted, equal_nan=True)


# ==== order statistics ==============================================================================================

LENGTHS = [3, 2, 5, 1]
SEVERAL = torch.tensor([0.1, 0.2], dtype=torch.float64)

STATISTICS = {
    "median": lambda t, d: t.median(d).values,
    "nanmedian": lambda t, d: t.nanmedian(d).values,
    "kthvalue": lambda t, d: t.kthvalue(1, d).values,
    "quantile": lambda t, d: t.quantile(0.3, d),
    "nanquantile": lambda t, d: t.nanquantile(0.7, d, interpolation="lower"),
    "midpoint": lambda t, d: t.quantile(0.4, d, interpolation="midpoint"),
    "nearest": lambda t, d: t.quantile(0.5, d, interpolation="nearest"),
    "higher": lambda t, d: t.quantile(torch.tensor(0.2, dtype=torch.float64), d, interpolation="higher"),
    "masked.median": torch.masked.median,
    "median, keepdim": lambda t, d: t.median(d, keepdim=True).values,
    "kthvalue, keepdim": lambda t, d: t.kthvalue(1, d, True).values,
    "quantile, keepdim": lambda t, d: t.quantile(0.5, d, keepdim=True),
    "place of median": lambda t, d: t.median(d).indices,
    "place of the first": lambda t, d: t.kthvalue(1, d).indices,
}
OF_ALL = {f.__name__: f for f in (torch.median, torch.nanmedian)}


test_of_rows = judged(
    {name: along(f) for name, f in STATISTICS.items()},
    pairs_of(LAYOUTS, [eager, desugared]),
    sweep=72,
    lengths=LENGTHS,
)
test_of_entries = judged({name: along(f, -1) for name, f in STATISTICS.items()}, lengths=LENGTHS)
test_of_all = judged(
    {name: (f, f) for name, f in OF_ALL.items()}
    | {
        "nanmedian beside NaN": (lambda t: t.log().nanmedian(),) * 2,
        "median of NaN": (lambda t: t.detach().log().median(),) * 2,
    }
    | {"of integers": (lambda t: (t.detach() * 10).nan_to_num(1000).long().median(),) * 2},
    pairs_of(LAYOUTS, [eager, desugared]),
    sweep=6,
    whole=True,
)


@layouts
@pytest.mark.parametrize("name", STATISTICS)
def test_of_positions(name, layout):
    f, batch = STATISTICS[name], make(layout, [5, 5, 2], width=5)
    expected = [f(torch.stack([row[t] for row in batch.rows if len(row) > t]), 0) for t in range(5)]
    check_parts(batch, [f(batch.x, 0)], [torch.stack(expected, 1 if "keepdim" in name else 0)])


def with_nans(name, layout):
    f, batch = STATISTICS[name], make(layout, LENGTHS)
    for row in batch.rows:
        row.detach()[0, :2] = torch.nan
    return f(batch.x, 1), torch.stack([f(row, 0) for row in batch.rows])


test_nans_that_exist = same(
    {
        name: lambda layout, name=name: with_nans(name, layout)
        for name in ("median", "nanmedian", "kthvalue", "quantile", "nanquantile")
    },
    *LAYOUTS,
)

test_what_order_statistics_refuse = refused(
    {
        "a median of nothing": (lambda x: x[:, 1:].median(1), (IndexError, RuntimeError), "no entries"),
        "k beyond a row": (lambda x: x.kthvalue(2, 1), RuntimeError, "fewer than k=2"),
        "k of 0": (lambda x: x.kthvalue(0, 1), IndexError, "k of at least 1"),
        "several quantiles": (
            lambda x: x.quantile(SEVERAL, 1),
            NotImplementedError,
            "expected one q and a dim",
        ),
        "no quantile": (lambda x: x.quantile(2.0, 1), RuntimeError, "between 0 and 1"),
    },
    lengths=LENGTHS,
)


# ==== torch.masked ==================================================================================================


MASKED_LENGTHS = [3, 5, 1]
COUNTING = {name: getattr(torch.masked, name) for name in ("mean", "var", "std")}
OTHERS = {name: getattr(torch.masked, name) for name in ("sum", "prod", "amax", "amin", "logsumexp")}
PLACES = {name: getattr(torch.masked, name) for name in ("argmax", "argmin")}
MASKED_ALONG = {
    name: getattr(torch.masked, name) for name in ("softmax", "log_softmax", "softmin", "cumsum", "cumprod")
}
MASK = (torch.arange(3 * 5 * 4).view(3, 5, 4) * 7 % 5) > 0
PARTS = {"": lambda m: m, "broadcast, ": lambda m: m[:1, :, :1]}


def all_entries(x):
    """A mask of the entries that exist."""
    return torch.ones_like(x, dtype=torch.bool)


# A mean, a variance and a deviation count entries, so their mask is that of the entries.
test_what_counts = judged(
    {
        name: (lambda x, f=f: f(x, 1, mask=all_entries(x)), lambda row, _, f=f: f(row, 0))
        for name, f in COUNTING.items()
    }
    | {
        f"{name} of all": (
            lambda x, f=f: f(x, (1, 2), keepdim=True, mask=all_entries(x))[:, 0],
            lambda row, _, f=f: f(row, (0, 1), keepdim=True)[0],
        )
        for name, f in COUNTING.items()
    },
    [pair for pair in pairs_of(LAYOUTS, WAYS) if pair != ("padded", stock)],
    sweep=36,
    lengths=MASKED_LENGTHS,
)
test_with_a_mask = judged(
    {
        name: (lambda x, f=f: f(x, -2, mask=x > 0), lambda row, _, f=f: f(row, 0, mask=row > 0))
        for name, f in (COUNTING | OTHERS).items()
    }
    | {
        name: (
            lambda x, f=f: f(x.detach(), -2, mask=x > 0),
            lambda row, _, f=f: f(row.detach(), 0, mask=row > 0),
        )
        for name, f in PLACES.items()
    },
    lengths=MASKED_LENGTHS,
)
test_a_dense_mask_joined_with_that_of_the_entries = judged(
    {
        f"{what}{name}": (
            lambda x, f=f, part=part: f(x, 1, mask=all_entries(x) & part(MASK)),
            lambda row, i, f=f, part=part: f(row, 0, mask=part(MASK).expand(3, 5, -1)[i, : len(row)]),
        )
        for name, f in COUNTING.items()
        for what, part in PARTS.items()
    },
    lengths=MASKED_LENGTHS,
    width=5,
)
test_along = judged({name: along(f) for name, f in MASKED_ALONG.items()}, lengths=MASKED_LENGTHS)


@pytest.mark.sweep(12)
@ways
@classes
@pytest.mark.parametrize(
    "mask",
    [None, torch.ones(3, 5, 4, dtype=torch.bool), torch.ones(5, 1) > 0],
    ids=["none", "dense", "broadcast"],
)
@pytest.mark.parametrize("name", COUNTING)
def test_what_would_count_the_padding_is_refused(name, mask, cls, way):
    x = cls.from_tensors([torch.ones(n, 4) for n in MASKED_LENGTHS])
    text = rf"torch\.masked\.{name} of a {cls.__name__} would count(.|\n)*write x\.{name}"
    with pytest.raises(DispatchError if way is eager else Exception, match=text):
        way(lambda x: COUNTING[name](x, 1, mask=mask))(x)


test_the_layout_can_be_asked_for = judged(
    {"strided": alike(lambda t: t * 2 if t.layout == torch.strided else t)}, pairs_of(LAYOUTS, WAYS)
)


@classes
@pytest.mark.parametrize(
    "options", [{}, {"unbiased": False}, {"correction": 0}, {"dtype": torch.float64}], ids=str
)
@pytest.mark.parametrize("name", COUNTING)
def test_dtypes_and_corrections(name, options, cls):
    rows, f = [torch.tensor([1, 2, 6]), torch.tensor([4, 7])], COUNTING[name]
    x, options = cls.from_tensors(rows), {"dtype": torch.float64} if name == "mean" else options
    expected = torch.stack([f(row, 0, **options) for row in rows])
    torch.testing.assert_close(f(x, 1, mask=all_entries(x), **options), expected)


# ==== segments ======================================================================================================

OPERATIONS = {  # and the size of an argument, for rows of 3, 0 and 2 entries
    "pad": ("total", 2),
    "unpad": (3, 3, 2),
    "spread_rows": (3, 2),
    "spread_positions": (3, 2),
    "sum_rows": ("total", 2),
    "sum_positions": ("total", 2),
}


def make_segments(gaps: tuple[int, ...]) -> Segments:
    """Rows after each of which so many entries do not exist."""
    sizes = torch.tensor([3, 0, 2])
    offsets = F.pad((sizes + torch.tensor(gaps)).cumsum(0), (1, 0))
    return Segments(offsets, sizes if any(gaps) else None, int(offsets[-1]), 3)


@pytest.mark.parametrize("gaps", [(0, 0, 0), (0, 1, 2)], ids=["back to back", "holes"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_gradients(operation, gaps):
    s = make_segments(gaps)
    size = [s.total if n == "total" else n for n in OPERATIONS[operation]]
    argument = torch.randn(size, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(getattr(s, operation), [argument])
    assert torch.autograd.gradgradcheck(getattr(s, operation), [argument])


def test_a_cotangent_of_what_does_not_exist_goes_nowhere():
    s, per_row = make_segments((1, 0, 2)), torch.ones(3, requires_grad=True)
    s.spread_rows(per_row).backward(torch.where(s.exists, 1.0, float("nan")))
    assert per_row.grad.tolist() == [3, 0, 2]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bool, torch.int64), (torch.int32, torch.int64), (torch.complex64, torch.complex64)],
)
def test_sums_have_the_dtype_of_torch_sum(dtype, expected):
    found = make_segments((0, 0, 0)).sum_rows(torch.ones(5, dtype=dtype))
    assert found.dtype == expected and found.tolist() == [3, 0, 2]
