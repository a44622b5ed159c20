"""Rules that ask whether an operand is a number, of which a compiler makes a symbol when it changes."""

from __future__ import annotations

import math
import warnings
from numbers import Number

import pytest
import torch
from torch import Tensor

import desugar
import subclasses
from subclasses import dynamic, inner
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


@pytest.mark.sweep(126)
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
