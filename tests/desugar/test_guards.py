"""What a program depends on: a call that differs in it compiles anew, one that does not runs what is there."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch
from torch import nn

from tests.desugar.classes import EVERY, Labeled, Nested, Pair, Tagged, TwoTensor, make
from tests.desugar.judge import by_pass
from tests.desugar.programs import assert_programs


def product(x, y):
    return x * y + x.sin()


def pair(cls=TwoTensor, *size, grad=(False, False)):
    size = size or (2, 6)
    return lambda: (make(cls, *size, grad=grad[0]), torch.randn(size[-1], requires_grad=grad[1]))


# ---- the state around ----------------------------------------------------------------------------------------


def test_grad_mode():
    call = pair(grad=(True, True))
    assert_programs(product, [call, call], 2, [contextlib.nullcontext, torch.no_grad])


def test_inference_mode():
    around = [torch.no_grad, torch.inference_mode, contextlib.nullcontext]
    assert_programs(product, [pair()] * 3, 3, around)


def test_inference_tensors():
    def inference_args():
        with torch.inference_mode():
            return pair()()

    assert_programs(product, [pair(), inference_args], 1 + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    around = [contextlib.nullcontext, lambda: torch.autocast("cpu", dtype=dtype)]
    assert_programs(lambda x, y: x @ y, [lambda: (make(Pair, 3, 3), torch.randn(3, 3))] * 2, 2, around)


def test_autocast_dtype():
    around = [
        lambda: torch.autocast("cpu", dtype=torch.float16),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ]
    assert_programs(lambda x, y: x @ y, [lambda: (make(Pair, 3, 3), torch.randn(3, 3))] * 2, 2, around)


def test_default_dtype():
    @contextlib.contextmanager
    def double():
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)

    calls = [lambda: (make(Pair, 3),)] * 2
    assert_programs(lambda x: x + torch.ones(3), calls, 2, [contextlib.nullcontext, double])


def test_default_device():
    calls = [lambda: (make(Pair, 3),)] * 2
    around = [contextlib.nullcontext, lambda: torch.device("meta")]
    assert_programs(lambda x: (x * 2, torch.ones(3)), calls, 2, around)


def test_deterministic_algorithms():
    @contextlib.contextmanager
    def deterministic():
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    def fn(x):
        return x * (2 if torch.are_deterministic_algorithms_enabled() else 1)

    assert_programs(fn, [lambda: (make(Pair, 3),)] * 2, 2, [contextlib.nullcontext, deterministic])


# ---- tensors -------------------------------------------------------------------------------------------------


def test_requires_grad_of_each_argument():
    calls = [pair(grad=(a, b)) for a in (False, True) for b in (False, True)]
    assert_programs(product, calls, 4)


def test_classes():
    assert_programs(product, [pair(cls) for cls in EVERY], len(EVERY))


def test_dtype_and_dims_and_strides():
    calls = [
        pair(),
        lambda: (make(TwoTensor, 2, 6, dtype=torch.float64), torch.randn(6)),
        lambda: (make(TwoTensor, 2, 6), torch.randn(2, 6)),
        lambda: (TwoTensor(torch.randn(6, 2).t(), torch.randn(6, 2).t()), torch.randn(6)),
        lambda: (TwoTensor(torch.randn(2, 6), torch.randn(2, 6)), torch.randn(12)[::2]),
    ]
    assert_programs(product, calls, len(calls))


def test_plain_or_wrapper_or_parameter():
    t = torch.randn
    calls = [
        lambda: (t(3), t(3)),
        lambda: (make(Pair, 3), t(3)),
        lambda: (t(3), make(Pair, 3)),
        lambda: (nn.Parameter(t(3)), t(3)),
    ]
    assert_programs(product, calls, 4)


@pytest.mark.parametrize(("cls", "word"), [(Tagged, "tag"), (Labeled, "label")])
def test_metadata_by_hand_and_declared(cls, word):
    t = torch.randn
    calls = [lambda v=v: (cls(t(2, 3), t(2, 3), **{word: v}), t(3)) for v in ("u", "v")]
    assert_programs(product, calls, 2)


def test_absent_inner_tensors():
    t = torch.randn
    assert_programs(product, [lambda: (Labeled(t(3)), t(3)), lambda: (Labeled(t(3), t(3)), t(3))], 2)


def test_which_arguments_are_one_object():
    """Dynamo guards which inner tensors are one as well."""
    x = [make(TwoTensor, 2, 3), make(TwoTensor, 2, 3)]
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    calls = [
        lambda: (x[0], x[1]),
        lambda: (x[0], x[0]),
        lambda: (TwoTensor(a, b), TwoTensor(b, a)),
        lambda: (TwoTensor(a, b), TwoTensor(a, b)),
        lambda: (TwoTensor(a, a), TwoTensor(b, b)),
    ]
    assert_programs(product, calls, 5)


def test_a_wrapper_inside_of_two_others():
    pair, flat = make(Pair, 3), torch.randn(3)

    def fn(x, y):
        return x * y

    calls = [
        lambda: (make(Nested, 3), make(Nested, 3)),
        lambda: (Nested(pair, flat), Nested(pair, torch.randn(3))),
        lambda: (Nested(make(Pair, 3), flat), Nested(make(Pair, 3), flat)),
        lambda: (make(Nested, 3), pair),
    ]
    assert_programs(lambda x, y: x * 2, calls, 1)  # what a function does not look at is not guarded
    x = Nested(pair, flat)
    assert_programs(fn, [lambda: (x, Nested(pair, flat))], 1)


Point = namedtuple("Point", "x y")


def test_structure():
    t = torch.randn
    calls = [
        lambda: ({"a": t(3)},),
        lambda: ({"a": t(3), "b": t(3)},),
        lambda: ({"b": t(3), "a": t(3)},),
        lambda: ([t(3)],),
        lambda: ((t(3),),),
        lambda: (t(3),),
        lambda: (Point(t(3), t(3)),),
    ]

    def fn(d):
        return sum(d.values()) * 2 if isinstance(d, dict) else d[0] * 2

    assert_programs(fn, calls, 7)  # the order of a dict's keys counts


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda d: defaultdict(list, d)])
def test_the_order_of_a_dict(kind):
    compiled = by_pass(lambda d: torch.stack([*d["k"].values()]))
    a, b = torch.ones(2), torch.zeros(2)
    for d in ({"a": a, "b": b}, {"b": b, "a": a}, {"b": a, "a": b}):
        assert torch.equal(compiled({"k": kind(d)}), torch.stack([*d.values()]))
    assert len(compiled.programs) == 2


def test_the_order_of_keyword_arguments():
    def fn(**kwargs):
        return torch.stack([*kwargs.values()])

    compiled = by_pass(fn)
    a, b = torch.ones(2), torch.zeros(2)
    for _ in range(2):
        assert torch.equal(compiled(a=a, b=b), torch.stack([a, b]))
        assert torch.equal(compiled(b=b, a=a), torch.stack([b, a]))
    assert len(compiled.programs) == 2
