"""Reductions over any dimensions, with a loop over the rows (or over the positions) as judge."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.subclasses.ragged.judge import LAYOUTS, WAYS, check_parts, check_rows, make_batch

# The judge warns where a row is too short for a variance; ours is NaN as well.
pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")

SUMS = [torch.sum, torch.mean, torch.var, torch.std, torch.logsumexp, torch.linalg.vector_norm]
DISCRETE = [torch.any, torch.all, torch.count_nonzero]
EXTREMA = [torch.amax, torch.amin]
DIMS = [d for n in (1, 2, 3) for d in itertools.combinations(range(3), n)]


def positions_of(rows: list[Tensor]) -> list[Tensor]:
    """For each position the entries of the rows that reach it: ``[rows, ...]``."""
    return [torch.stack([row[t] for row in rows if len(row) > t]) for t in range(max(map(len, rows)))]


def judge(batch, f, dims, keepdim, on_ragged=None) -> None:
    """``f(t, dims, keepdim)`` by loops: over rows, positions, or all entries, as the dimensions say."""
    got = (on_ragged or f)(batch.x, dims, keepdim)
    features = [d for d in dims if d == 2]
    rows = [row.movedim(batch.ragged_dim - 1, 0) for row in batch.rows]
    if 0 in dims and 1 in dims:
        expected = f(torch.cat(rows), tuple([0] + [1] * len(features)), keepdim)
        expected = expected.unsqueeze(0) if keepdim else expected
        parts, expected = [got], [expected]
    elif 0 in dims:
        loop = [f(p, tuple([0] + [1] * len(features)), keepdim) for p in positions_of(rows)]
        parts, expected = [got], [torch.stack(loop, 1 if keepdim else 0)]
    else:
        expected = [f(row, tuple(d - 1 for d in dims), keepdim) for row in rows]
        parts = got.to_tensors() if isinstance(got, JaggedTensor) else list(got)
        if keepdim and 1 not in dims:
            assert got.shape[:2] == batch.x.shape[:2]
    check_parts(batch, parts, expected)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "ragged dim 2"])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("f", SUMS, ids=lambda f: f.__name__)
def test_sums(f, dims, keepdim, layout):
    judge(make_batch(layout), lambda t, d, k: f(t, dim=d, keepdim=k), dims, keepdim)


@pytest.mark.parametrize("layout", ["back to back", "holes"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("f", EXTREMA, ids=lambda f: f.__name__)
def test_extrema(f, dims, layout):
    judge(make_batch(layout, lengths=[3, 5, 1]), lambda t, d, k: f(t, dim=d, keepdim=k), dims, False)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("f", DISCRETE, ids=lambda f: f.__name__)
def test_discrete(f, dims, dtype):
    batch = make_batch(dtype=torch.int64)
    batch.leaf = (batch.leaf % 3).to(dtype)
    judge(batch, lambda t, d, k: f(t, dim=d), dims, False)


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("f", [torch.sum, torch.mean, torch.amax, torch.logsumexp], ids=lambda f: f.__name__)
def test_ragged_dim_2(f, dim):
    batch = make_batch("ragged dim 2", lengths=[3, 5, 1], entry=(4, 2))  # [B, 4, T, 2]
    check_rows(batch, lambda x: f(x, dim), lambda row, _: f(row, dim - 1))
    check_rows(batch, lambda x: f(x, dim, keepdim=True), lambda row, _: f(row, dim - 1, keepdim=True))
    check_rows(
        batch,
        lambda x: f(x, (dim, -1 if dim < 3 else 1)),
        lambda row, _: f(row, (dim - 1, -1 if dim < 3 else 0)),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "f", [torch.sum, torch.mean, torch.var, torch.amax, torch.nansum, torch.prod], ids=lambda f: f.__name__
)
def test_all_entries(f, layout):
    batch = make_batch(layout)
    check_parts(batch, [f(batch.x)], [f(torch.cat([row.flatten() for row in batch.rows]))])


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("f", [torch.max, torch.min], ids=lambda f: f.__name__)
def test_extrema_with_indices(f, part):
    batch = make_batch("holes", lengths=[3, 5, 1])
    check_rows(batch, lambda x: f(x, 1)[part], lambda row, _: f(row, 0)[part])
    check_rows(batch, lambda x: f(x, 2)[part], lambda row, _: f(row, 1)[part])


def test_arguments_of_extrema():
    batch = make_batch("holes", lengths=[3, 5, 1])
    check_rows(batch, lambda x: x.argmax(1), lambda row, _: row.argmax(0))
    check_rows(batch, lambda x: x.argmin(-1), lambda row, _: row.argmin(-1))


@pytest.mark.parametrize("f", [torch.amax, torch.amin, torch.argmax], ids=lambda f: f.__name__)
def test_an_empty_row_has_no_extremum(f):
    with pytest.raises(IndexError, match=r"no entries in rows \[1\]"):
        f(make_batch().x, 1)


def test_an_empty_row_sums_to_zero_and_has_no_mean():
    x = make_batch(lengths=[2, 0]).x
    assert (x.sum(1)[1] == 0).all() and x.mean(1)[1].isnan().all()


@pytest.mark.sweep(4)
@pytest.mark.parametrize("way", WAYS[1:], ids=lambda w: w.__name__)
@pytest.mark.parametrize("f", [torch.sum, torch.mean, torch.var, torch.amax], ids=lambda f: f.__name__)
def test_in_graphs(f, way):
    def run(x):
        return f(x, 1), f(x, 0), f(x, (0, 1)), f(x, 2).sum()

    compiled = way(run)
    for lengths in ([3, 5, 1], [2, 2, 6, 4]):
        batch = make_batch(lengths=lengths)
        got = compiled(batch.x)
        expected = run(batch.x)
        check_parts(batch, got, expected)


def test_merged_dimensions_reduce_as_both():
    batch = make_batch("holes")
    check_parts(batch, [batch.x.flatten(0, 1).sum(0)], [torch.cat(batch.rows).sum(0)])
    check_parts(batch, [batch.x.flatten(0, 1).mean()], [torch.cat(batch.rows).mean()])
    check_parts(batch, [batch.x.flatten(0, 1).var(0)], [torch.cat(batch.rows).var(0)])


def test_half_precision_and_dtype():
    batch = make_batch(lengths=[4096], entry=(1,), dtype=torch.float32)
    ones = torch.ones_like(batch.x).to(torch.bfloat16)
    assert ones.sum(1).item() == 4096 and ones.sum(1).dtype == torch.bfloat16
    assert ones.sum(dtype=torch.float64).dtype == torch.float64


INTEGERS = {
    "logsumexp": lambda t, d: t.logsumexp(d),
    "softmax": lambda t, d: t.softmax(d, dtype=torch.float64).sum(d),
    "log_softmax": lambda t, d: t.log_softmax(d, dtype=torch.float64).sum(d),
    "cumsum": lambda t, d: t.cumsum(d, dtype=torch.float64).sum(d),
}


@pytest.mark.parametrize("cls", [JaggedTensor, PaddedTensor], ids=lambda c: c.__name__)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", INTEGERS)
def test_the_least_integer_counts(name, dtype, cls):
    """So none of them stands for what does not exist."""
    if dtype.is_complex and name != "logsumexp":
        pytest.skip("PyTorch has none")
    f, rows = INTEGERS[name], [torch.randint(0, 4, (n, 2)).to(dtype) for n in (3, 1, 2)]
    torch.testing.assert_close(list(f(cls.from_tensors(rows), 1)), [f(row, 0) for row in rows])


@pytest.mark.parametrize("dim", [3, -4, (0, 0)])
def test_no_such_dimension(dim):
    with pytest.raises(IndexError, match="distinct dimensions of a JaggedTensor"):
        make_batch().x.sum(dim)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.sampled_from(DIMS), st.booleans())
def test_any_rows(lengths, dims, keepdim):
    if max(lengths):
        judge(make_batch("holes", lengths), lambda t, d, k: t.sum(d, keepdim=k), dims, keepdim)
