"""Results that are views of an inner tensor of an argument: what eager mode says of them holds."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

import desugar
from subclasses import TensorSubclass, inner
from subclasses.ragged import JaggedTensor
from tests.desugar.judge import judge
from tests.desugar.tracing.test_outputs import assert_plays_as_eager

DOORS = {
    "desugar.compile": lambda fn: desugar.compile(fn, backend="eager", fullgraph=True, strict=True),
    "backend": lambda fn: torch.compile(
        fn, backend="desugar", options={"backend": "eager", "strict": True}, fullgraph=True
    ),
}


class Pair(TensorSubclass, fallback="map"):
    a: Tensor = inner(differentiable=True)
    b: Tensor = inner()


class Outer(TensorSubclass, fallback="map"):
    pair: Tensor = inner()


def pair(grad):
    return Pair(torch.randn(6, 3), torch.randn(6, 3)).requires_grad_(grad)


def unwrapped_inside(x):
    with torch.no_grad():
        return [x.unwrap("b")[1:3]]


FUNCTIONS = {
    "a part": lambda x: [x.unwrap("a")[1:3]],
    "two parts": lambda x: list(x.unwrap("b").split([2, 4])),
    "overlapping parts": lambda x: [x.unwrap("a")[:4], x.unwrap("a")[2:]],
    "transposed": lambda x: [x.unwrap("a").t()],
    "whole": lambda x: [x.unwrap("a")],
    "a field": lambda x: [x.a, x.a[2]],
    "a raw field": lambda x: [x.b[1:3], x.b.view(-1)],
    "of both": lambda x: [x.unwrap("a")[1], x.unwrap("b")[1], x * 2],
    "without gradient inside": unwrapped_inside,
    "beside a result": lambda x: [x.a[1:3], (x * 3).unwrap("a")],
}


def views_of(results, x):
    """Which results share the memory of an argument and are views."""
    storages = [part.untyped_storage().data_ptr() for part in (x._raw_a, x.b)]
    plain = [t for t in results if not isinstance(t, Pair)]
    return [t._is_view() for t in plain if t.untyped_storage().data_ptr() in storages]


@pytest.mark.sweep(12)
@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize("fn", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize(("grad", "leaf"), [(True, True), (True, False), (False, True)])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_what_results_are(door, fn, grad, leaf):
    def make_args():
        x = pair(grad)
        return (x,) if leaf else (x * 1, x)

    compiled = judge(lambda x, *leaf: fn(x), make_args, way=door, calls=2)
    mine, theirs = make_args(), make_args()
    assert views_of(compiled(*mine), mine[0]) == views_of(fn(theirs[0]), theirs[0])


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize("grad", [True, False])
def test_a_write_to_a_part_is_refused_or_noticed_as_in_eager_mode(door, grad):
    def make_args():
        x = pair(grad)
        return x, x._raw_a

    fn = lambda x, raw: [x.unwrap("a")[1:3]]  # noqa: E731
    assert_plays_as_eager(fn, make_args, door, "result", contextlib.nullcontext)


class Scaled(torch.autograd.Function):
    """A view whose gradient is another one than that of a view."""

    @staticmethod
    def forward(ctx, t):
        return t.view_as(t)

    @staticmethod
    def backward(ctx, grad):
        return grad * 10


def nested(grad):
    return Outer(Pair(torch.randn(4, 2), torch.randn(4, 2))).requires_grad_(grad)


def written(x):
    x.mul_(2)
    return x.unwrap("a")[1:3]


def of_nested(x):
    return [x.unwrap("pair").unwrap("a")[1:3], x.unwrap("pair").unwrap("b").t()]


OTHERS = {
    "a gradient of its own": (lambda x: Scaled.apply(x.unwrap("a"))[1:3], lambda: pair(True)),
    "after a write": (written, lambda: pair(False)),
    "of a detached value": (lambda x: x.detach().unwrap("a")[1:3], lambda: pair(True)),
    "nested": (of_nested, lambda: nested(False)),
    "nested, with a gradient": (of_nested, lambda: nested(True)),
}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize("name", OTHERS)
def test_of_other_values(door, name):
    fn, make_x = OTHERS[name]
    judge(fn, lambda: (make_x(),), way=door)


def test_rows_of_ever_new_lengths_are_one_program():
    compiled = DOORS["desugar.compile"](lambda x: [x.values[1:], x.values.t()])
    for lengths in ((2, 4), (3, 5), (9, 2)):
        x = JaggedTensor.from_tensors([torch.randn(n, 3) for n in lengths]).requires_grad_()
        tail, across = compiled(x)
        assert tail.equal(x.values[1:]) and across.equal(x.values.t()) and across._is_view()
    assert len(compiled.programs) == 1
