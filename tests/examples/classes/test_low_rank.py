"""The matrix of low rank, declared and by hand: products are those of the matrix, and never make it."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from by_hand.low_rank import LowRank as ByHand
from classes.low_rank import LowRank
from subclasses import strict
from subclasses.testing import suite
from tests.examples.classes.checks import check_gradients, converted, refused

X = torch.linspace(-1, 1, 18).view(3, 6)


def make(cls, rows=4, rank=2, columns=6, dtype=None):
    return cls(torch.randn(rows, rank, dtype=dtype), torch.randn(rank, columns, dtype=dtype))


def suite_of(cls, **options):
    ops = {F.linear: lambda x: (X, x), torch.matmul: lambda x: (x, X.t())}
    return suite(partial(make, cls), ops=ops, sizes=[partial(make, cls, n) for n in (5, 7)], **options)


TestLowRank = suite_of(LowRank)
TestByHand = suite_of(ByHand, construct=ByHand)


@pytest.fixture(params=[LowRank, ByHand], ids=["declared", "by hand"])
def cls(request):
    return request.param


@contextmanager
def no_matrix():
    """Raises where an op makes the matrix."""
    with strict(), mock.patch.object(ByHand, "materialize", side_effect=AssertionError):
        yield


def chain(x, a, b):
    return F.linear(x @ a, b, x[0] @ a @ b.mT @ torch.ones(4, 4, dtype=x.dtype)).tanh() @ a


@pytest.mark.sweep(3)
def test_values_and_gradients(cls, way):
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    factors = [t.requires_grad_() for size in ((4, 2), (2, 6)) * 2 for t in [torch.randn(size).double()]]
    wrapped = cls(*factors[:2]), cls(*factors[2:])
    expected = chain(x, factors[0] @ factors[1], factors[2] @ factors[3])
    check_gradients(way(chain)(x, *wrapped), expected, [x, *factors])


def test_gradients_of_products_and_of_the_matrix_add_up(cls):
    factors = torch.randn(4, 2, requires_grad=True), torch.randn(2, 6, requires_grad=True)
    results = [(torch.ones(3, 4) @ w, w * w) for w in (cls(*factors), factors[0] @ factors[1])]
    check_gradients(*results, factors, lambda t: t[0].square().sum() + t[1].sum())


@pytest.mark.sweep(2)
@pytest.mark.parametrize("ranks", [(1, 3), (3, 1), (2, 2)])
def test_a_product_of_two_keeps_the_smaller_rank(cls, way, ranks):
    a, b = make(cls, 4, ranks[0], 6), make(cls, 6, ranks[1], 5)
    with no_matrix():
        product = way(torch.matmul)(a, b)
    assert isinstance(product, cls) and product.left.shape[1] == min(ranks)
    torch.testing.assert_close(product.materialize(), a.materialize() @ b.materialize())


def test_no_product_makes_the_matrix(cls, way):
    w = make(cls, 400, 2, 600)
    with no_matrix():
        got = way(lambda w, x, v: (w @ x, w @ v, F.linear(v, w)))(w, torch.randn(600, 3), torch.ones(600))
    assert [t.shape for t in got[1:]] == [(400,), (400,)]


@pytest.mark.parametrize("size", [(4,), (2, 3, 4), (0, 4)], ids=str)
def test_batches_vectors_and_keywords(cls, size):
    w, x = make(cls, 4, 2, 4), torch.randn(size)
    torch.testing.assert_close(x @ w, x @ w.materialize())
    torch.testing.assert_close(w @ x.unsqueeze(-1), w.materialize() @ x.unsqueeze(-1))
    torch.testing.assert_close(F.linear(x, weight=w, bias=X[0, :4]), F.linear(x, w.materialize(), X[0, :4]))


@pytest.mark.parametrize("size", [(0, 1, 3), (3, 0, 2), (1, 1, 1), (8, 3, 8)], ids=str)
def test_sizes_of_none_and_one_and_the_nearest_matrix(cls, size):
    w = make(cls, *size)
    assert w.shape == (size[0], size[2])
    torch.testing.assert_close(w @ torch.ones(size[2], 2), w.materialize() @ torch.ones(size[2], 2))
    if 0 not in size:
        nearest = cls.nearest(w.materialize(), size[1]).materialize()
        torch.testing.assert_close(nearest, w.materialize(), rtol=1e-4, atol=1e-4)


MAKES = [partial(make, LowRank), partial(make, ByHand)]
test_conversions = converted(
    MAKES, [torch.bfloat16, torch.float64], lambda w: [w @ torch.ones(6, dtype=w.dtype), 2 / w - w]
)
test_what_is_refused = refused(
    MAKES,
    {
        "other factors": (
            ValueError,
            r"factors of sizes \[4, 2\] and \[3, 6\]",
            [lambda w: type(w)(torch.ones(4, 2), torch.ones(3, 6))],
        ),
        "writes": (
            NotImplementedError,
            None,
            [
                lambda w: w.mul_(2),
                lambda w: w.__iadd__(w),
                lambda w: w.copy_(torch.zeros(4, 6)),
                lambda w: w.__setitem__(0, 1.0),
            ],
        ),
    },
)
