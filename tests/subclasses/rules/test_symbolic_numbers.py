"""Rules that ask whether an operand is a number, of which a compiler makes a symbol when it changes."""

import math
import warnings
from numbers import Number

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import desugar
import subclasses
from subclasses import dynamic, inner
from subclasses.ragged import JaggedTensor, PaddedTensor
from subclasses.rules.symbolic_numbers import _ints_of
from tests.desugar.idioms.running import DOORS, by_stock
from tests.desugar.judge import assert_same_values, leaves_of
from tests.doors import COMPILED as COMPILERS
from tests.subclasses.subjects import declare

aten = torch.ops.aten

Log = declare(
    name="Log",
    keywords={"fallback": "materialize"},
    log=inner(),
    count=dynamic(default=2),
    materialize=lambda self: self.log.exp(),
)


def is_number(y):
    return isinstance(y, Number)


def by_float(func, x, y):
    return Log(x.log + math.log(y)) if isinstance(y, float | int) else func(x.materialize(), y)


def by_helper(func, x, y):
    return Log(x.log + math.log(y)) if is_number(y) else func(x.materialize(), y)


def by_match(func, x, y):
    match y:
        case float() | int():
            return Log(x.log + math.log(y))
    return func(x.materialize(), y)


def by_tensor(func, x, y):
    return func(x.materialize(), y) if isinstance(y, Tensor) else Log(x.log + y)


def with_rule(key, rule):
    return declare(Log, rules={key: rule})


CALLS = {
    "a float": (lambda x, r: x * r, [3.0, 2.0, 4.0]),
    "an int": (lambda x, r: x * r, [3, 2, 4]),
    "a size": (lambda x, r: x * r.shape[0], [torch.ones(n) for n in (3, 2, 4)]),
    "a dynamic int": (lambda x, r: x * x.count, [0, 0, 0]),
}


@pytest.mark.sweep(252)
@pytest.mark.parametrize("door", COMPILERS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("rule", [by_float, by_helper, by_match])
@pytest.mark.parametrize(
    "key", [aten.mul.Tensor, torch.mul, subclasses.arithmetic], ids=["op", "function", "family"]
)
def test_a_rule_takes_the_way_that_it_takes_in_eager_mode(key, rule, call, door):
    cls, (function, operands) = with_rule(key, rule), CALLS[call]
    compiled = COMPILERS[door](function)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i, operand in enumerate(operands):
            x = cls(torch.zeros(2), count=3 + i)
            got, expected = compiled(x, operand), function(x, operand)
            assert type(got) is type(expected) is Log
            torch.testing.assert_close(got.log, expected.log)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("door", COMPILERS)
@pytest.mark.parametrize("key", [aten.mul.Tensor, torch.mul], ids=["op", "function"])
def test_a_bool_of_numbers_is_a_bool(key, door):
    cls = with_rule(
        key,
        lambda func, x, y: Log(x.log + (1 if y else 2)) if isinstance(y, bool) else func(x.materialize(), y),
    )
    function = lambda x, n: x * (n > 3)  # noqa: E731
    compiled = COMPILERS[door](function)
    for n in (4, 5, 2):
        x = cls(torch.zeros(2))
        assert compiled(x, n).log.tolist() == function(x, n).log.tolist()


def by_arithmetic(func, x, y):
    z = 2 * y / 2
    return Log(x.log + z) if isinstance(z, float) else func(x.materialize(), y)


@pytest.mark.parametrize("rule", [by_tensor, by_arithmetic])
def test_one_program_serves_all_numbers(rule):
    cls, met = with_rule(aten.mul.Tensor, rule), []
    compiled = desugar.compile(lambda x, r: x * r, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for r in (3.0, 2.0, 4.0, 5.0):
            assert compiled(cls(torch.zeros(2)), r).log.tolist() == [r, r]
            met.append(len(compiled.programs))
    assert met == [1, 2, 2, 2]


# ---- rules for torch functions, called with numbers that change between two calls --------------------------

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


@pytest.mark.sweep(216)
@EVERY_COMPILER
@pytest.mark.parametrize("cls", [JaggedTensor, PaddedTensor])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "slice of rows")) for n in FUNCTIONS]
)
def test_a_number_changes(name, cls, door):
    compiled = door(FUNCTIONS[name])
    for n in (2, 1, 3, 2):
        assert_same_values(leaves_of(compiled(ragged(cls), n)), leaves_of(FUNCTIONS[name](ragged(cls), n)))


@pytest.mark.sweep(18)
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
