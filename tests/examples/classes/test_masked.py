"""Masked data: results are those of the present entries, whatever the missing ones hold."""

from __future__ import annotations

import pytest
import torch

from classes.masked import Masked
from subclasses import DispatchError
from subclasses.testing import suite
from tests.examples.classes.checks import check_gradients, converted, refused
from tests.tables import giving

aten = torch.ops.aten
BINARY = (torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum)
UNARY = (torch.abs, torch.neg, torch.exp, torch.log, torch.sqrt, torch.reciprocal, torch.sigmoid, torch.tanh)


def make(rows=4):
    return Masked(torch.randn(rows, 6), torch.rand(rows, 6) > 0.4)


def make_whole(rows=4):
    """With every entry present, so that each op is that on the values."""
    return Masked(torch.randn(rows, 6), torch.ones(rows, 6, dtype=torch.bool))


OPS = {
    **{op: lambda x: (x,) for op in (*UNARY, torch.square, torch.relu, torch.isfinite, torch.isnan)},
    **{op: lambda x: (x, x[:1]) for op in (*BINARY, torch.eq, torch.ne, torch.le, torch.ge, torch.gt)},
    torch.rsub: lambda x: (x, 2),
    torch.clamp: lambda x: (x, -0.5, 0.5),
    aten.permute: lambda x: (x, [1, 0]),
    aten.squeeze: lambda x: (x[:1], 0),
}
TestMasked = suite(make, sizes=[lambda n=n: make(n) for n in (5, 7)])
TestWhole = suite(make_whole, reference=lambda x: x.values, ops=OPS, paths={})


@pytest.mark.sweep(3)
def test_values_and_gradients(way):
    masks = [torch.rand(4, 6) > 0.3, torch.rand(4, 6) > 0.3]
    masks[0][1] = False
    plain = [torch.rand(4, 6).masked_fill_(~mask, torch.nan).requires_grad_() for mask in masks]

    def function(x, y):
        return ((x.log() - 2 / y) * y.relu() / x.sqrt()).t().mean(0)

    got, both = way(function)(*map(Masked, plain, masks)), masks[0] & masks[1]
    rows = [row for row in range(4) if both[row].any()]
    expected = [function(plain[0][r][both[r]], plain[1][r][both[r]]) for r in rows]
    assert got.mask.nonzero().squeeze(1).tolist() == rows and 1 not in rows
    check_gradients(got.values[rows], torch.stack(expected), plain, torch.sum)  # NaN would differ


@pytest.mark.parametrize("op", [*UNARY, torch.square, torch.relu], ids=lambda op: op.__name__)
@pytest.mark.parametrize("missing", [torch.nan, torch.inf, 0.0, -1.0])
def test_a_missing_entry_reaches_no_gradient(op, missing):
    values = torch.tensor([0.5, missing], requires_grad=True)
    y = op(Masked(values, torch.tensor([True, False]))).sum()
    torch.testing.assert_close(y.values, op(values[:1]).sum())
    (gradient,) = torch.autograd.grad(y.values, values)
    assert gradient[0].isfinite() and gradient[1] == 0


def test_operands_broadcast(way):
    x, row, number = make(), Masked(torch.randn(6), torch.arange(6) > 1), torch.tensor(3.0)
    y = way(lambda x, row, number: 1 - (x + row) * number)(x, row, number)
    assert torch.equal(y.mask, x.mask & (torch.arange(6) > 1))
    torch.testing.assert_close(y.filled(0), (1 - (x.values + row.values) * 3).masked_fill(~y.mask, 0))


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [None, 0, -1, (0, 1)])
def test_reductions_by_each_dim(dim, keepdim):
    x = make()
    n, total = x.mask.sum(dim, keepdim), x.values.masked_fill(~x.mask, 0).sum(dim, keepdim)
    for got, expected in (
        (x.sum(dim, keepdim), total),
        (x.mean(dim, keepdim=keepdim), (total / n).nan_to_num()),
    ):
        torch.testing.assert_close(got.filled(0), expected)
        assert torch.equal(got.mask, n > 0)


test_conversions_keep_the_mask = converted(
    [make],
    [torch.bfloat16, torch.float64, torch.int32],
    lambda x: [x + 1, x * x, x.abs(), *([x.mean(), x.sum(0)] if x.is_floating_point() else [])],
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_a_missing_zero_is_no_division_by_zero(dtype):
    x = make().to(dtype)
    assert (x / x).mask.equal(x.mask) and x.sum(0).dtype == x.values.sum(0).dtype


EMPTY = Masked(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool))
test_no_entries_one_and_zeros = giving(
    {
        "sums of nothing": (lambda: EMPTY.sum(0).mask.tolist(), [False] * 3),
        "a mean of nothing": (lambda: EMPTY.mean().mask, False),
        "nothing, and one": (lambda: (EMPTY + 1).shape, (0, 3)),
        "a single entry": (lambda: (2 / Masked(torch.tensor(2.0), torch.tensor(True))).mean().values, 1),
        # zeros are present
        **{
            name: (
                lambda zeros=zeros: (zeros().mask.all().item(), zeros().values.any().item()),
                (True, False),
            )
            for name, zeros in {
                "zeros_like": lambda: torch.zeros_like(make()),
                "new_zeros": lambda: make().new_zeros(2, 3),
            }.items()
        },
    }
)


def test_views_of_inner_tensors_with_other_strides(way):
    x = Masked(torch.randn(4, 6), torch.rand(6, 4).t() > 0.5)
    row = way(lambda x: x[1] * 1)(x)
    assert torch.equal(row.mask, x.mask[1])
    torch.testing.assert_close(row.filled(0), x.filled(0)[1])
    with pytest.raises(NotImplementedError, match="the same strides mean other elements"):
        x.as_strided((2,), (1,))


SHORT, PLAIN = torch.ones(2, dtype=torch.bool), torch.zeros(4, 6)
test_what_is_refused = refused(
    [make],
    {
        "another mask": (
            ValueError,
            r"values of size \[3\] with a mask of size \[2\]",
            [lambda x: Masked(torch.ones(3), SHORT)],
        ),
        "writes, and ops without a rule": (
            DispatchError,
            None,
            [
                lambda x: x.add_(1),
                lambda x: x.__isub__(x),
                lambda x: x.copy_(PLAIN),
                lambda x: x.zero_(),
                lambda x: x.cumsum(0),
                lambda x: x @ x.t(),
                lambda x: torch.mul(x, x, out=x),
                lambda x: PLAIN.add_(x),
            ],
        ),
    },
)
