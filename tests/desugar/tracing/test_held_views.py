"""New wrappers that hold views of an argument which the function writes to share memory with it, as in eager mode."""

from __future__ import annotations

import pytest
import torch

import desugar
from subclasses.ragged import JaggedTensor
from tests.desugar.classes import Pair

DOORS = {
    "desugar.compile": lambda fn, backend: desugar.compile(fn, backend=backend),
    "backend": lambda fn, backend: torch.compile(fn, backend="desugar", options={"backend": backend}),
}


def pair():
    return Pair(torch.arange(6.0).view(2, 3), torch.ones(2, 3))


def rows():
    return JaggedTensor(torch.arange(10.0).view(5, 2), torch.tensor([0, 2, 5]), max_length=3)


def doubled(x):
    y = x * 2
    x.copy_(y)
    return Pair(y.a[1:], y.b[1:])  # no memory of x


def beside_a_view(x):
    x.add_(1)
    return Pair(x.a.view(-1), x.b.view(-1)), x[1:]


CASES = {
    "another shape": (pair, lambda x: (x.add_(1), Pair(x.a.view(-1), x.b.view(-1)))[1]),
    "a write to one": (pair, lambda x: (x.a.add_(1), Pair(x.a[1:], x.b[1:]))[1]),
    "aliases": (pair, lambda x: (x.add_(1), Pair(torch.ops.aten.alias(x.a), x.b))[1]),
    "a copy": (pair, doubled),
    "beside a view": (pair, beside_a_view),
    "no write": (pair, lambda x: Pair(x.a.view(-1), x.b.view(-1))),
    "shorter rows": (rows, lambda x: (x.add_(1), x[:, :-1])[1]),
    "some rows": (rows, lambda x: (x.mul_(2), x[1:])[1]),
    "a write to some entries": (rows, lambda x: (x.__setitem__((slice(None), -1), 9.0), x[:, :-1])[1]),
}


def parts(x):
    return [x.a, x.b] if isinstance(x, Pair) else [x.values]


def play(fn, make):
    """What results hold at once, and what the arguments hold once the results are written to."""
    seen = []
    for _ in range(2):
        x = make()
        results = fn(x)
        for y in results if isinstance(results, tuple) else (results,):
            seen += [t.clone() for t in parts(y)]
            y.add_(100)
        seen += [t.clone() for t in parts(x)]
    return seen


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_a_write_to_the_result_reaches_the_argument(case, backend, door):
    make, fn = CASES[case]
    for got, wanted in zip(play(DOORS[door](fn, backend), make), play(fn, make), strict=True):
        torch.testing.assert_close(got, wanted)
    if door == "desugar.compile":
        desugar.compile(fn, backend=backend, strict=True)(make())


def test_an_argument_in_another_memory_order_than_its_new_value_is_left_to_pytorch():
    def strided():
        return Pair(torch.arange(12.0).view(2, 6)[:, ::2], torch.ones(2, 6)[:, ::2])

    def fn(x):
        x.add_(1)
        return Pair(x.a[1:], x.b[1:])

    with pytest.raises(desugar.DesugarError, match="in another memory order"):
        desugar.compile(fn, backend="eager", strict=True)(strided())
