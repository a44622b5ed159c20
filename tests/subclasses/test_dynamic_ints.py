"""Dynamic ints under stock torch.compile: right, and no program for each new value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from subclasses import Outer, dynamic, inner
from tests.subclasses.subjects import MODES, Rows, Tagged, assert_same, declare

VALUES = (5, 7, 2, 30, 11)


def of_rows(func, *args, **kwargs):
    x = next(a for a in args if isinstance(a, Repeat))
    return Repeat(func(*(getattr(a, "row", a) for a in args), **kwargs), count=x.count)


# `count` equal rows, with a rule of each kind.
Repeat = declare(
    name="Repeat",
    row=inner(),
    count=dynamic(),
    outer=staticmethod(lambda row, count: Outer((count, *row.shape))),
    rules={
        torch.Tag.pointwise: of_rows,
        torch.sum: lambda func, x: x.unwrap("row").sum() * x.count,
    },
)


def counted(fn, backend="aot_eager"):
    counter = CompileCounterWithBackend(backend)
    return torch.compile(fn, backend=counter, fullgraph=True), counter


def same_with_grads(fn, compiled, make):
    """Runs both on fresh values of one seed and compares results and the gradient of what they are made of."""
    grads = []
    for run in (fn, compiled):
        torch.manual_seed(1)
        leaf = torch.randn(3, requires_grad=True)
        out = run(make(leaf))
        (out if out.dim() == 0 else out.sum()).backward()
        grads.append((out.detach(), leaf.grad))
    assert_same(grads[0][0], grads[1][0])
    assert_same(grads[0][1], grads[1][1])


# ---- values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_program_serves_every_value(backend):
    compiled, counter = counted(lambda x: (x * 2).sin(), backend)
    for n in VALUES:
        x = Tagged(torch.ones(3), length=n)
        out = compiled(x)
        assert out.length == n and type(out.length) is int
        assert_same(out, (x * 2).sin())
    assert counter.frame_count == 1


# The function, the values of the int, and the programs that serve them; 0 and 1 may have programs of their own.
SERVED = {
    "the outer size follows": (lambda x: (x * 2).sin() * x.size(0), VALUES, {1}),
    "a value that is read inside": (lambda x: (x * 2) * x.count, VALUES, {2}),
    "zero": (lambda x: x * 2, (4, 0, 6), {1, 2}),
    "one": (lambda x: x * 2, (4, 1, 6), {1, 2}),
    "the result of one program in the next": (lambda x: x.sin(), VALUES, {1}),
}


@pytest.mark.parametrize("case", SERVED)
def test_few_programs_serve_every_value(case):
    fn, values, programs = SERVED[case]
    compiled, counter = counted(fn)
    for n in values:
        x = Repeat(torch.randn(3), count=n)
        got, want = compiled(x), fn(x)
        assert_same(got, want)
        if "next" in case:
            assert_same(compiled(got), fn(want))
    assert counter.frame_count in programs


def test_construction_inside_from_an_int():
    def fn(row, n):
        return Repeat(row * 2, count=n).sin()

    compiled, counter = counted(fn)
    for n in VALUES:
        row = torch.randn(3)
        out = compiled(row, n)
        assert type(out.count) is int
        assert_same(out, fn(row, n))
    assert counter.frame_count == 2


# ---- gradients ---------------------------------------------------------------------------------------------


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.sum((x * 2).sin()),
        lambda x: torch.sum((x * 2).sin() * x.size(0)),
        lambda x: (x * 2).sin().sum() * 3,
    ],
)
def test_one_program_with_a_backward(fn):
    compiled, counter = counted(fn)
    for n in VALUES:
        same_with_grads(fn, compiled, lambda leaf, n=n: Repeat(leaf, count=n))
    assert counter.frame_count == 1


def test_a_wrapper_that_comes_back_has_a_wrapper_as_its_tangent():
    compiled, counter = counted(lambda x: (x * 2).sin())
    for n in VALUES:
        same_with_grads(
            lambda x: torch.sum((x * 2).sin()),
            lambda x: torch.sum(compiled(x)),
            lambda leaf, n=n: Repeat(leaf, count=n),
        )
    assert counter.frame_count == 1


@pytest.mark.slow
def test_inductor():
    def fn(x):
        return torch.sum((x * 2).sin() * x.size(0))

    compiled = torch.compile(fn, fullgraph=True)
    for n in VALUES:
        same_with_grads(fn, compiled, lambda leaf, n=n: Repeat(leaf, count=n))


# ---- eager -------------------------------------------------------------------------------------------------


def test_carriers_are_made_when_a_value_is_taken_apart():
    x = Rows(torch.randn(4), count=3)
    assert "_count_carrier" not in x.__dict__
    names, layout = x.__tensor_flatten__()
    assert names == ["row", "_count_carrier"]
    assert x._count_carrier.shape == (3, 0)
    again = Rows.__tensor_unflatten__({n: getattr(x, n) for n in names}, layout, x.shape, x.stride())
    assert_same(x, again)


def test_which_outer_dims_follow():
    assert Rows(torch.randn(4), count=3)._dynamo_propagated_dynamic_indices == {0}
    assert Rows(torch.randn(4), count=1)._dynamo_propagated_dynamic_indices == set()
    assert not hasattr(Tagged(torch.randn(3), length=3), "_dynamo_propagated_dynamic_indices")


# ---- writes between values of different ints -----------------------------------------------------------------


Stepped = declare(name="Stepped", live=inner(), step=dynamic(), keywords={"fallback": "map"})


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mode", ["desugar", "stock"])
@pytest.mark.parametrize("write", [Tensor.copy_, Tensor.add_])
def test_a_write_of_another_int_is_refused_by_a_program_too(write, mode):
    """A program was made for values of equal ints; later ones had others, and were copied in silence."""

    def fn(x, y):
        write(y, x)
        return y * 1

    compiled = MODES[mode](fn)
    for step in (1, 3, 1, 7):
        x, y = Stepped(torch.ones(2), step=step), Stepped(torch.zeros(2), step=1)
        if step == 1:
            assert compiled(x, y).live.tolist() == y.live.tolist() == [1, 1]
            continue
        for run in (fn, compiled):
            with pytest.raises(Exception, match=r"another step: expected 1, got|with different metadata"):
                run(x, y)
        assert y.live.tolist() == [0, 0]
