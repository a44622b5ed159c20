"""The log-probability, declared and by hand: values and gradients are those of the probabilities, also in underflow."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from by_hand.log_probability import LogProbability as ByHand
from classes.log_probability import LogProbability
from subclasses.testing import suite
from tests.examples.classes.checks import check_gradients, converted, refused

aten = torch.ops.aten


def make(cls, rows=4, dtype=None):
    return cls(torch.randn(rows, 6, dtype=dtype))


OPS = {
    aten.permute: lambda x: (x, [1, 0]),
    aten.squeeze: lambda x: (x[:1], 0),
    torch.prod: lambda x: (x, 0),
    torch.reciprocal: lambda x: (x,),
    **{op: lambda x: (x, x * 2) for op in (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)},
}


def suite_of(cls, **options):
    return suite(partial(make, cls), ops=OPS, sizes=[partial(make, cls, n) for n in (5, 7)], **options)


TestLogProbability = suite_of(LogProbability)
TestByHand = suite_of(ByHand, construct=ByHand)


@pytest.fixture(params=[LogProbability, ByHand], ids=["declared", "by hand"])
def cls(request):
    return request.param


def formula(x, y):
    return ((x * y + 0.5 * x / y) * 2 + y[0]).sum(-1).prod(0) * (2 / y).prod()


@pytest.mark.sweep(6)
def test_values_and_gradients(cls, way):
    logs = [torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    expected = formula(*(log.exp() for log in logs)).log()
    check_gradients(way(formula)(*map(cls, logs)).values, expected, logs, torch.sum)


@pytest.mark.sweep(2)
def test_a_leaf_gets_the_gradient_by_its_logarithms(cls, way):
    x = make(cls).requires_grad_()
    way(lambda x: (x * x + x).sum())(x).values.backward()
    logs = x.detach().values.clone().requires_grad_()
    torch.logaddexp(2 * logs, logs).logsumexp((0, 1)).backward()
    assert isinstance(x.grad, cls)
    torch.testing.assert_close(x.grad.values, logs.grad)


def test_what_underflows_as_a_probability(cls, way):
    x = cls(torch.full((2000,), 1e-3).log())
    assert x.materialize().prod() == 0
    torch.testing.assert_close(way(torch.prod)(x).values, torch.tensor(1e-3).log() * 2000)


MOVES = {
    "row": lambda x: x[1],
    "rows": lambda x: x[::2],
    "t": lambda x: x.t(),
    "mT": lambda x: x.mT,
    "view": lambda x: x.view(-1),
    "reshape": lambda x: x.t().reshape(-1),
    "permute": lambda x: x.permute(1, 0),
    "squeeze": lambda x: x[:1].squeeze(0),
    "unsqueeze": lambda x: x.unsqueeze(1),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_gradients_of_moved_entries_and_of_all(cls, move):
    logs = torch.randn(4, 6, requires_grad=True)
    x = cls(logs)
    check_gradients(
        (move(x).values, x.values), (move(logs), logs), [logs], lambda t: t[0].square().sum() + t[1].sum()
    )


def test_no_entries_and_one(cls):
    assert cls(torch.zeros(0, 3)).sum(0).materialize().tolist() == [0.0] * 3
    assert cls(torch.zeros(0, 3)).prod(0).materialize().tolist() == [1.0] * 3
    for shape in ((), (1,), (1, 1)):
        x = cls(torch.zeros(shape))
        torch.testing.assert_close((x + x).sum().materialize(), torch.tensor(2.0))
        assert x.sum((), keepdim=True).shape == shape


MAKES = [partial(make, LogProbability), partial(make, ByHand)]
ONES = torch.ones(6)
test_numbers_and_conversions_keep_the_dtype = converted(
    MAKES,
    [torch.float16, torch.bfloat16, torch.float64],
    lambda x: (2 * x, x / 2, 2 / x, x + 1, x.sum(0), x.prod()),
)
test_what_is_refused = refused(
    MAKES,
    {
        "a negative number": (ValueError, "cannot represent the negative number -1", [lambda x: x * -1]),
        "plain tensors": (
            NotImplementedError,
            r"pass LogProbability\(tensor.log\(\)\)",
            [lambda x: x * ONES, lambda x: ONES * x, lambda x: x + ONES],
        ),
        "integers": (
            NotImplementedError,
            r"floating-point logarithms, not torch\.int64",
            [lambda x: type(x)(torch.ones(2, dtype=torch.int64))],
        ),
        "a conversion to them": (NotImplementedError, r"no rule for aten\._to_copy", [lambda x: x.long()]),
        "ops without a rule": (
            NotImplementedError,
            "LogProbability has no rule for aten",
            [
                lambda x: x - x.clone(),
                lambda x: x.sub_(x.clone()),
                lambda x: x.mul_(x.clone()),
                lambda x: x.exp(),
                lambda x: -x,
            ],
        ),
    },
)
