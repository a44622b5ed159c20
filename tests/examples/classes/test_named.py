"""The tensor with named dimensions: results are those of plain tensors aligned by hand."""

from __future__ import annotations

import pytest
import torch

from classes.named import Named
from subclasses import DispatchError
from subclasses.testing import suite
from tests.examples.classes.checks import check_gradients, converted, refused
from tests.tables import giving

UNARY = (torch.exp, torch.neg, torch.abs, torch.relu, torch.tanh, torch.square, torch.reciprocal)
BINARY = (
    torch.add,
    torch.sub,
    torch.mul,
    torch.div,
    torch.maximum,
    torch.minimum,
    torch.eq,
    torch.lt,
    torch.ge,
)


def make(rows=4, dims=("a", "b")):
    return Named(torch.randn(rows, 6), dims=dims)


TestNamed = suite(
    make,
    reference=lambda x: x.values,
    sizes=[lambda n=n: make(n) for n in (5, 7)],
    variants=[lambda: make(dims=("b", "a")), lambda: make(dims=("a", "c"))],
    skip={"mixed_metadata"},  # the reference has no names, by which values are aligned
)
TestRules = suite(
    make,
    reference=lambda x: x.values,
    ops={
        **{op: lambda x: (x,) for op in UNARY},
        **{op: lambda x: (x, x + 1) for op in BINARY},
        **{op: lambda x: (x, 0) for op in (torch.sum, torch.mean, torch.amax, torch.amin)},
        torch.pow: lambda x: (x, 2),
        torch.rsub: lambda x: (x, 2),
        torch.where: lambda x: (x > 0, x, 0.0),
    },
    paths={},
)


def formula(x, y, z):
    return (x * y - 2 / z.exp()).sum("b").amax(0) + (1 - y).mean(("b", 0)) * x.at(a=0, b=slice(1, 3)).sum()


@pytest.mark.sweep(3)
def test_values_and_gradients(way):
    x, y, z = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((4, 3), (5, 3), (5,)))
    named = Named(x, dims=("a", "b")), Named(y, dims=("c", "b")), Named(z, dims=("c",))
    got = way(formula)(*named)
    aligned = x[:, :, None] * y.T - 2 / z.exp()
    expected = aligned.sum(1).amax(0) + (1 - y).mean() * x[0, 1:3].sum()
    assert got.dims == ("c",)
    check_gradients(got.values, expected, (x, y, z))


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin", "std", "var"])
@pytest.mark.parametrize(("name", "position"), [("a", 0), ("b", -1), (("b", "a"), (1, 0)), (None, None)])
def test_names_and_positions_agree(name, position, reduce, keepdim):
    x = make()
    every = (0, 1) if position is None else position
    expected = getattr(torch, reduce)(x.values, every, keepdim=keepdim)
    got, by_position = (getattr(x, reduce)(dim, keepdim) for dim in (name, position))
    assert got.dims == by_position.dims and len(got.dims) == got.ndim == expected.ndim
    torch.testing.assert_close([got.values, by_position.values], [expected] * 2)


X, Y = make(), Named(torch.randn(6, 4), dims=("b", "a"))
NUMBER = Named(torch.tensor(2.0), dims=())


def told(x):
    """Names and numbers."""
    return x.dims, x.values.tolist()


test_names_of_results = giving(
    {
        # the order of the operands does not matter
        "a sum": (lambda: told(X + Y), (("a", "b"), (X.values + Y.values.T).tolist())),
        "the other way": (lambda: told(Y + X), (("b", "a"), (X.values + Y.values.T).T.tolist())),
        # reductions by position, as PyTorch's parser has it
        "logsumexp": (lambda: told(torch.logsumexp(X, 0)), (("b",), X.values.logsumexp(0).tolist())),
        "any": (lambda: (X > 0).any("a").values.dtype, torch.bool),
        "all": (lambda: (X > 9).all("b").dims, ("a",)),
        "order": (lambda: X.order("new", "b", "a").values.tolist(), [X.values.T.tolist()]),
        "at": (lambda: told(X.at(b=2)), (("a",), X.values[:, 2].tolist())),
        "at none": (lambda: X.at(a=slice(0, 0)).shape, (0, 6)),
        # no entries, one, and no dimensions
        "a sum of nothing": (lambda: make(0).sum("a").values.tolist(), [0] * 6),
        "nothing": (lambda: (make(0) * 2).shape, (0, 6)),
        "one row": (lambda: (make(4) + make(1)).values.shape, (4, 6)),
        "a number": (lambda: (2 / NUMBER).sum().values, 1),
        "a number and a row": (lambda: (NUMBER * make(1)).dims, ("a", "b")),
    }
)
test_conversions_keep_the_names = converted(
    [make],
    [torch.bfloat16, torch.float64, torch.int32],
    lambda x: [x + 1, x * x, x.sum("a").to(x.dtype)],
)
test_what_is_refused = refused(
    [make],
    {
        "other numbers of names": (
            ValueError,
            "need as many different names",
            [
                lambda x: Named(torch.ones(2, 2), dims=("a",)),
                lambda x: Named(torch.ones(2, 2), dims=("a", "a")),
                lambda x: Named(torch.ones(()), dims=("a",)),
            ],
        ),
        "a name that is not there": (
            ValueError,
            r"no dimension c among \('a', 'b'\)",
            [lambda x: x.sum("c")],
        ),
        "another size": (RuntimeError, "must match", [lambda x: x + make(5)]),
        "an order of some": (RuntimeError, None, [lambda x: x.order("a")]),
        "plain tensors": (
            NotImplementedError,
            "have no names",
            [lambda x: x + torch.ones(6), lambda x: torch.ones(4, 6) * x],
        ),
        "ops without a rule": (
            DispatchError,
            "Named has no rule for aten",
            [
                lambda x: x.mul_(2),
                lambda x: x.__isub__(x),
                lambda x: x[0],
                lambda x: x.T,
                lambda x: x.cumsum(0),
            ],
        ),
    },
)
