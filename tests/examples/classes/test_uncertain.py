"""Uncertain values: errors are those of the first-order expansion, which autograd gives."""

from __future__ import annotations

import pytest
import torch

from classes import uncertain as example
from classes.uncertain import Uncertain
from subclasses import DispatchError
from subclasses.testing import suite
from tests.examples.classes.checks import check_gradients, converted, refused
from tests.tables import giving

aten = torch.ops.aten


def make(*size):
    size = size or (4, 6)
    return Uncertain(torch.rand(size) + 0.5, torch.rand(size))


OPS = {
    **{op: lambda x: (x,) for op in (*example.UNARY, torch.sum)},
    **{op: lambda x: (x, x[:1] * 2) for op in example.BINARY},
    torch.pow: lambda x: (x, 2),
    torch.mean: lambda x: (x, 0),
    aten.select: lambda x: (x, 0, 1),
    aten.view: lambda x: (x, [-1]),
    aten.slice: lambda x: (x, 0, 1, 3),
    aten.permute: lambda x: (x, [1, 0]),
    aten.transpose: lambda x: (x, 0, 1),
    aten.t: lambda x: (x,),
    aten.unsqueeze: lambda x: (x, 1),
    aten.squeeze: lambda x: (x[:1], 0),
}
SOME = {op: OPS[op] for op in (torch.mul, torch.exp, torch.sum, aten.select)}
TestUncertain = suite(make, ops=SOME, sizes=[lambda n=n: make(n, 6) for n in (5, 7)])
TestRules = suite(make, ops=OPS, paths={})


def expand(function, values, errors):
    """Value and first-order error of a function of independent entries."""
    value = function(*values)
    errors_of_entries = []
    for entry in value.reshape(-1):
        slopes = torch.autograd.grad(entry, values, create_graph=True, allow_unused=True)
        terms = [(s * e).square().sum() for s, e in zip(slopes, errors, strict=True) if s is not None]
        errors_of_entries.append(torch.stack(terms).sum().sqrt())
    return value, torch.stack(errors_of_entries).view(value.shape)


FORMULAS = {
    "difference": lambda x, y: (x - y).sum(0),
    "product": lambda x, y: 3 * x[1] * y,
    "quotient": lambda x, y: (2 - x.t() / y.t()).mean(),
    "powers": lambda x, y: x.mean(0, keepdim=True) ** 3 + y.sqrt(),
    "functions": lambda x, y: (2 / y.exp()).sum() * x.log().abs().mean(1),
    "views": lambda x, y: -x.square().view(-1)[::2] / 4,
}


@pytest.mark.sweep(18)
@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS)
def test_values_errors_and_gradients(formula, way):
    values = [(torch.rand(4, 6, dtype=torch.float64) + 0.5).requires_grad_() for _ in range(2)]
    errors = [torch.rand(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    got, expected = way(formula)(*map(Uncertain, values, errors)), expand(formula, values, errors)
    check_gradients((got.value, got.error), expected, [*values, *errors], lambda t: (t[0].sin() + t[1]).sum())


def test_errors_agree_with_random_measurements():
    x, y = Uncertain(torch.tensor(2.0), torch.tensor(0.01)), Uncertain(torch.tensor(3.0), torch.tensor(0.02))
    a, b = (t.value + t.error * torch.randn(200_000) for t in (x, y))
    errors, deviations = [(x / y).error, (x * y).error], [(a / b).std(), (a * b).std()]
    torch.testing.assert_close(errors, deviations, rtol=0.02, atol=0)


def test_exact_values_get_finite_gradients():
    error = torch.zeros(3, requires_grad=True)
    x = Uncertain(torch.ones(3), error)
    for y in (x + x[0], x * x[0], x.sum(), x / x[0]):
        assert not y.error.any()
        assert torch.autograd.grad(y.error.sum(), error)[0].isfinite().all()


test_conversions = converted(
    [make],
    [torch.bfloat16, torch.float64],
    lambda x: [x + x, 2 * x, 2 / x, x**2, x.sum(0), x.mean(), x.exp()],
)


ONE = make(1)
test_no_entries_and_one = giving(
    {
        "a sum of nothing": (lambda: make(0, 3).sum(0).error.tolist(), [0] * 3),
        "a sum of one": (lambda: ONE.sum(0).error, ONE.error[0]),
        "one and nothing": (lambda: (ONE * make(0)).shape, (0,)),
        "a mean": (lambda: make(1, 1).mean().shape, ()),
    }
)
test_what_is_refused = refused(
    [make],
    {
        "other errors": (
            ValueError,
            r"values of size \[3\] with errors of size \[2\]",
            [lambda x: Uncertain(torch.ones(3), torch.ones(2))],
        ),
        "integers": (NotImplementedError, r"values of torch\.int64", [lambda x: x.long()]),
        "no rule": (DispatchError, "Uncertain has no rule for aten", [lambda x: x.tanh()]),
        "writes, and ops without a formula": (
            NotImplementedError,
            None,
            [
                lambda x: x.add_(1),
                lambda x: x.__imul__(x),
                lambda x: x.copy_(torch.zeros(4, 6)),
                lambda x: x @ x.t(),
                lambda x: x > 1,
                lambda x: 2**x,
                lambda x: x**x,
                lambda x: torch.mul(x, x, out=x),
            ],
        ),
    },
)
