"""Reductions, order statistics, ``torch.masked`` and pointwise ops, with a loop over the rows as judge."""

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
    EVERY,
    JAGGED,
    LAYOUTS,
    LENGTHS,
    WAYS,
    alike,
    along,
    check_parts,
    classes,
    desugared,
    eager,
    hold,
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
    stock,
    two_ways,
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


def positions_of(rows):
    """For each position the entries of the rows that reach it: ``[rows, ...]``."""
    return [torch.stack([row[t] for row in rows if len(row) > t]) for t in range(max(map(len, rows)))]


def judge(batch, f, dims, keepdim, way=eager):
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


@pytest.mark.sweep(36)
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("f", [*SUMS, *EXTREMA])
@pytest.mark.parametrize(
    ("layout", "way"),
    [
        *pairs_of([*LAYOUTS, "not contiguous", "counted"]),
        *pairs_of(["padded", "counted"], [desugared]),
        *pairs_of(["back to back"], WAYS[1:]),
    ],
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


DISCRETE_ROWS = [torch.randint(0, 2, (3, 4)), torch.zeros(0, 4, dtype=torch.int64)]
DISCRETE_TABLE = PaddedTensor.from_tensors(DISCRETE_ROWS, multiple=5)
test_discrete_beside_any_padding = same(
    {
        f"{f.__name__}, {fill}": lambda f=f, fill=fill: (
            (lambda x: [f(x, dim=1), f(x)])(DISCRETE_TABLE.with_padded(DISCRETE_TABLE.to_dense(fill=fill))),
            [torch.stack([f(row, dim=0) for row in DISCRETE_ROWS]), f(DISCRETE_ROWS[0])],
        )
        for f in DISCRETE
        for fill in (0, 7)
    }
)


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
    sweep=16,
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


def near_overflow(f, cls):
    rows = [(torch.rand(n, 2) * 200 + 200).half() for n in (500, 3)]
    return f(cls.from_tensors(rows), 1), torch.stack([f(row, 0) for row in rows])


test_half_precision_does_not_overflow = same(
    {f.__name__: lambda cls, f=f: near_overflow(f, cls) for f in (torch.mean, torch.var, torch.std)},
    *(JaggedTensor, PaddedTensor),
    tolerance=2e-3,
)


INTEGERS = {
    "logsumexp": lambda t, d: t.logsumexp(d),
    "softmax": lambda t, d: t.softmax(d, dtype=torch.float64).sum(d),
    "log_softmax": lambda t, d: t.log_softmax(d, dtype=torch.float64).sum(d),
    "cumsum": lambda t, d: t.cumsum(d, dtype=torch.float64).sum(d),
}


def of_integers(f, dtype, cls):
    """The rows hold 0, the least integer of some dtypes, so no integer can mark padding."""
    rows = [torch.randint(0, 4, (n, 2)).to(dtype) for n in (3, 1, 2)]
    return list(f(cls.from_tensors(rows), 1)), [f(row, 0) for row in rows]


test_the_least_integer_counts = same(
    {
        f"{name}, {dtype}": lambda cls, f=f, dtype=dtype: of_integers(f, dtype, cls)
        for name, f in INTEGERS.items()
        for dtype in (torch.uint8, torch.bool, torch.int64, torch.complex128)
        if not dtype.is_complex or name == "logsumexp"
    },
    *(JaggedTensor, PaddedTensor),
)


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
    sweep=32,
)


INF, NAN = float("inf"), float("nan")
EXTREMES = [torch.tensor(row) for row in ([1.0, NAN, -INF, INF], [-INF], [INF, INF, NAN], [])]
test_extreme_entries_sort_before_what_does_not_exist = same(
    {
        f"{descending}, {part}": lambda layout, descending=descending, part=part: (
            hold(layout, EXTREMES).sort(1, descending=descending)[part],
            [row.sort(dim=0, descending=descending, stable=True)[part] for row in EXTREMES],
        )
        for descending in (False, True)
        for part in (0, 1)
    },
    *LAYOUTS,
)


# ==== order statistics ==============================================================================================

NO_EMPTY_ROW = [3, 2, 5, 1]
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
    sweep=144,
    lengths=NO_EMPTY_ROW,
)
test_of_entries = judged({name: along(f, -1) for name, f in STATISTICS.items()}, lengths=NO_EMPTY_ROW)
test_of_all = judged(
    {name: (f, f) for name, f in OF_ALL.items()}
    | {
        "nanmedian beside NaN": (lambda t: t.log().nanmedian(),) * 2,
        "median of NaN": (lambda t: t.detach().log().median(),) * 2,
    }
    | {"histc": (lambda t: t.detach().histc(4, -1, 1),) * 2}
    | {"of integers": (lambda t: (t.detach() * 10).nan_to_num(1000).long().median(),) * 2},
    pairs_of([*LAYOUTS, "counted"], [eager, desugared]),
    sweep=12,
    whole=True,
)


@layouts
@pytest.mark.parametrize("name", STATISTICS)
def test_of_positions(name, layout):
    f, batch = STATISTICS[name], make(layout, [5, 5, 2], width=5)
    expected = [f(torch.stack([row[t] for row in batch.rows if len(row) > t]), 0) for t in range(5)]
    check_parts(batch, [f(batch.x, 0)], [torch.stack(expected, 1 if "keepdim" in name else 0)])


def with_nans(name, layout):
    f, batch = STATISTICS[name], make(layout, NO_EMPTY_ROW)
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
    lengths=NO_EMPTY_ROW,
)
test_gaps_have_no_bounds = refused(
    {"histc": (lambda x: x.histc(3), DispatchError, "expected min and max")}, ["holes", "padded"]
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


# A mean, a variance and a deviation count entries, so their mask is the mask of the entries.
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
    sweep=72,
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


@pytest.mark.sweep(24)
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
    {"strided": alike(lambda t: t * 2 if t.layout == torch.strided else t)}, pairs_of(LAYOUTS, WAYS), sweep=3
)


def corrected(name, options, cls):
    rows, f = [torch.tensor([1, 2, 6]), torch.tensor([4, 7])], COUNTING[name]
    x, options = cls.from_tensors(rows), {"dtype": torch.float64} if name == "mean" else options
    return f(x, 1, mask=all_entries(x), **options), torch.stack([f(row, 0, **options) for row in rows])


test_dtypes_and_corrections = same(
    {
        f"{name}, {options}": lambda cls, name=name, options=options: corrected(name, options, cls)
        for name in COUNTING
        for options in ({}, {"unbiased": False}, {"correction": 0}, {"dtype": torch.float64})
    },
    *(JaggedTensor, PaddedTensor),
)


# ==== segments ======================================================================================================

OPERATIONS = {  # and the size of an argument, for rows of 3, 0 and 2 entries
    "pad": ("total", 2),
    "unpad": (3, 3, 2),
    "spread_rows": (3, 2),
    "spread_positions": (3, 2),
    "sum_rows": ("total", 2),
    "sum_positions": ("total", 2),
}


def make_segments(gaps):
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


test_sums_have_the_dtype_of_torch_sum = giving(
    {
        str(dtype): (
            lambda dtype=dtype: (lambda found: (found.dtype, found.tolist()))(
                make_segments((0, 0, 0)).sum_rows(torch.ones(5, dtype=dtype))
            ),
            (expected, [3, 0, 2]),
        )
        for dtype, expected in (
            (torch.bool, torch.int64),
            (torch.int32, torch.int64),
            (torch.complex64, torch.complex64),
        )
    }
)


# ==== pointwise ===================================================================================================

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

test_unary = judged({f.__name__: alike(f) for f in UNARY}, [*pairs_of(ANY), ("padded", desugared)], sweep=12)
test_two_ragged = judged(
    {f.__name__: alike(lambda t, f=f: f(t, t * 2 + 1)) for f in BINARY}, pairs_of(EVERY), sweep=3
)
test_scalars_on_either_side = judged(
    {f.__name__: alike(lambda t, f=f: f(f(t, SCALAR), SCALAR)) for f in BINARY[:6]}, pairs_of(JAGGED)
)


# ---- dense operands that broadcast -----------------------------------------------------------------------------

B, T, D = len(LENGTHS), max(LENGTHS), 4
# The shape of a dense operand beside [B, T, D], and the part of it that a row sees.
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
    sweep=120,
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


@pytest.mark.sweep(12)
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


OF_ENTRIES, WIDE = make_batch().x.detach(), torch.ones(4, dtype=torch.float64)
test_dtypes = giving(
    {
        str(dtype): (
            lambda dtype=dtype: (
                lambda y: (
                    y.offsets is OF_ENTRIES.offsets,
                    y.dtype,
                    (y + WIDE).dtype,
                    (y + y).values.tolist(),
                )
            )(OF_ENTRIES.to(dtype)),
            (
                True,
                dtype,
                torch.promote_types(dtype, torch.float64),
                (OF_ENTRIES.values.to(dtype) + OF_ENTRIES.values.to(dtype)).tolist(),
            ),
        )
        for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.complex64)
    }
)


# ==== ops within entries ============================================================================================

WITHIN_PAIRS = pairs_of([*LAYOUTS, "counted"], [eager, desugared])
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
    {name: (f, lambda row, _, g=g: g(row)) for name, (f, g) in WITHIN.items()}, WITHIN_PAIRS, sweep=96
)
test_rows_that_are_cropped = judged(CROPS, WITHIN_PAIRS, sweep=24, lengths=[3, 1, 5])
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

test_distances = judged({name: (*alike(f), BIAS) for name, f in OF_TWO.items()}, WITHIN_PAIRS, sweep=48)
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


def multilabel(x):
    return F.multilabel_soft_margin_loss(x, (x.detach() > 0).double(), reduction="none")


test_losses = judged(
    {name: alike(lambda t, f=f: f(t, "none")) for name, f in LOSSES.items()}
    | {
        "cosine": alike(
            lambda t: F.cosine_embedding_loss(t, t * t, t.detach().sum(-1).sign(), 0.1, reduction="none")
        )
    }
)
test_means_of_losses = judged(
    {name: (lambda t, f=f: f(t, "mean"),) * 2 for name, f in LOSSES.items()}, whole=True
)
# The mean over classes that are places of a row is one over what exists.
test_classes_that_are_places = judged(
    {"multilabel": (multilabel, lambda row, _: multilabel(row[None])[0])}, lengths=[3, 5, 1], entry=()
)

# ---- refused ---------------------------------------------------------------------------------------------------


# The derivative of a sum inside another op would count the padding.
test_a_sum_inside_another_op_is_no_silent_error = refused(
    {
        "trapz": (
            lambda x: torch.trapz(x + BIAS, dim=-1),
            NotImplementedError,
            "gradient would count entries",
        )
    }
)
test_a_sum_inside_another_op = same(
    {
        "trapz": torch.no_grad()(
            lambda layout: (
                lambda x: (
                    torch.trapz(x + BIAS, dim=-1),
                    [torch.trapz(row + BIAS, dim=-1) for row in x.to_tensors()],
                )
            )(make(layout).x)
        )
    },
    *LAYOUTS,
)


REFUSED_ALONG = r"ragged along|ragged one|stays|vector norm"
NO_OUT = "not written to an out="
OUT = torch.zeros(0, dtype=torch.float64)

test_ops_within_entries_that_are_refused = refused(
    {
        "unfold": (lambda x: x.unfold(0, 2, 1), NotImplementedError, REFUSED_ALONG),
        "pad of the batch": (lambda x: F.pad(x, (0, 0, 0, 0, 0, 1)), NotImplementedError, REFUSED_ALONG),
        "reflection": (lambda x: F.pad(x, (0, 1), mode="reflect"), NotImplementedError, REFUSED_ALONG),
        "roll of all": (lambda x: x.roll(1), NotImplementedError, REFUSED_ALONG),
        "flip of merged rows": (lambda x: x.flatten(0, 1).flip(0), NotImplementedError, REFUSED_ALONG),
        "glu of rows": (lambda x: F.glu(x, 1), NotImplementedError, REFUSED_ALONG),
        "nuclear norm": (lambda x: torch.linalg.norm(x, "nuc", (1, 2)), NotImplementedError, REFUSED_ALONG),
        "sum_to_size": (lambda x: x.sum_to_size(3, 4), ValueError, "is not an expansion of"),
    }
)
# A dense tensor that is written to would get the size of the stored values.
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
