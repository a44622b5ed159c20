"""``backward()`` inside a compiled function ends the graph, and the engine calls the library's own functions there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import subclasses
from subclasses import TensorSubclass, inner
from tests.subclasses.subjects import LowRank


class Ruled(TensorSubclass, fallback="views"):
    number: Tensor = inner(differentiable=True)


@Ruled.implements(subclasses.arithmetic)
def arithmetic(func, x, y):
    return Ruled(func(*(t.number if isinstance(t, Ruled) else t for t in (x, y))))


def by_formula(left, right, x):
    return (x @ LowRank(left, right)).sum()


def by_materialize(left, right, x):
    return (x @ LowRank(left, right).materialize()).sum()


def by_rules(left, right, x):
    return (Ruled(left) * 2 + Ruled(right.sum())).number.square().sum() * x.sum()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("fn", [by_formula, by_materialize, by_rules])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_gradients(fn, backend):
    def step(left, right, x):
        loss = fn(left, right, x)
        loss.backward()
        return loss.detach()

    def run(call):
        torch.manual_seed(0)
        left, right = nn.Parameter(torch.rand(4, 1)), nn.Parameter(torch.rand(1, 3))
        return [call(left, right, torch.ones(2, 4)) for _ in range(2)], left.grad, right.grad

    torch.testing.assert_close(run(torch.compile(step, backend=backend)), run(step))
