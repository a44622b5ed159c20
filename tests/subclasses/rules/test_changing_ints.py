"""Rules for torch functions, called with numbers that change between two calls of a compiled function."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from subclasses.ragged import JaggedTensor, PaddedTensor
from subclasses.rules.symbolic_numbers import _ints_of
from tests.desugar.idioms.running import DOORS, by_stock
from tests.desugar.judge import assert_same_values, leaves_of
from tests.subclasses.subjects import declare

aten = torch.ops.aten

EVERY_COMPILER = pytest.mark.parametrize("door", {**DOORS, "stock": by_stock}.values())


def looking(func, x, dim, **options):
    assert type(dim) is int and (0, 1, 2, 3)[dim] == dim
    return func(x.unwrap("held"), dim, **options)


# A class whose rules look into a tuple by the number of a dimension.
Dim = declare(
    keywords={"fallback": "materialize"},
    materialize=lambda self: self.held,
    rules={torch.amax: looking, F.softmax: looking},
)


def ragged(cls):
    generator = torch.Generator().manual_seed(0)
    return cls.from_tensors([torch.randn(n, 4, 6, generator=generator) for n in (3, 5, 2)])


FUNCTIONS = {
    "amax": lambda x, n: x.amax(n),
    "softmax": lambda x, n: F.softmax(x, dim=n),
    "sum": lambda x, n: x.sum(n),
    "mean, of a tuple": lambda x, n: x.mean((n, -1) if n != 3 else n),
    "argmax": lambda x, n: x.argmax(n),
    "cumsum": lambda x, n: x.cumsum(n),
    "select": lambda x, n: x.select(n, 0),
    "select, an index": lambda x, n: x.select(2, n),
    "slice of rows": lambda x, n: x[:, :n].sum(1),
    "cat": lambda x, n: torch.cat([x, x], n),
    "transpose": lambda x, n: x.transpose(n, -1),
    "roll": lambda x, n: x.roll(n, 2),
    "roll, a dim": lambda x, n: x.roll(2, n),
    "chunk": lambda x, n: x.chunk(n, 2),
    "prod": lambda x, n: x.prod(n),
    "masked.sum": lambda x, n: torch.masked.sum(x, n),
    "flip": lambda x, n: x.flip(n),
    "norm": lambda x, n: x.norm(2, n),
    "topk, a dim": lambda x, n: x.topk(1, n).values,
}


@pytest.mark.sweep(108)
@EVERY_COMPILER
@pytest.mark.parametrize("cls", [JaggedTensor, PaddedTensor])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "slice of rows")) for n in FUNCTIONS]
)
def test_a_number_changes(name, cls, door):
    compiled = door(FUNCTIONS[name])
    for n in (2, 1, 3, 2):
        assert_same_values(leaves_of(compiled(ragged(cls), n)), leaves_of(FUNCTIONS[name](ragged(cls), n)))


@pytest.mark.sweep(9)
@EVERY_COMPILER
@pytest.mark.parametrize(
    "fn", [lambda x, n: x.amax(n), lambda x, n: F.softmax(x, dim=n), lambda x, n: F.softmax(x, n)]
)
def test_a_rule_of_an_author_gets_an_int(fn, door):
    compiled = door(fn)
    for n in (2, 1, 0):
        x = torch.rand(2, 3, 4)
        torch.testing.assert_close(compiled(Dim(x), n), fn(x, n))


def positions(func):
    return sorted(_ints_of(func).positions) if _ints_of(func) else []


POSITIONS = {
    torch.roll: [2],  # shifts are SymInts
    torch.Tensor.select: [1],
    torch.narrow: [1],
    F.softmax: [1],
    torch.chunk: [1, 2],
    torch.split: [2],
    torch.Tensor.split: [2],
    torch.add: [],
    F.layer_norm: [],
}


def test_what_is_an_int_follows_the_schema():
    assert {func: positions(func) for func in POSITIONS} == POSITIONS
    assert _ints_of(torch.flip).following == 1
