"""Dynamic ints under stock torch.compile: right, and no program for each new value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from subclasses import Outer, dynamic, inner
from tests.subclasses.subjects import MODES, Rows, Tagged, assert_same, counted, declare

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


# The function, the values of the int, and the programs that serve them; 0 and 1 may have programs of their own.
def repeated(n):
    return Repeat(torch.randn(3), count=n)


def twice_sine(x):
    return (x * 2).sin()


SERVED = {
    "no outer size follows": (twice_sine, lambda n: (Tagged(torch.ones(3), length=n),), VALUES, {1}),
    "no outer size follows, by eager": (
        twice_sine,
        lambda n: (Tagged(torch.ones(3), length=n),),
        VALUES,
        {1},
    ),
    "the outer size follows": (
        lambda x: (x * 2).sin() * x.size(0),
        lambda n: (repeated(n),),
        VALUES,
        {1},
    ),
    "a value that is read inside": (lambda x: (x * 2) * x.count, lambda n: (repeated(n),), VALUES, {2}),
    "zero": (lambda x: x * 2, lambda n: (repeated(n),), (4, 0, 6), {1, 2}),
    "one": (lambda x: x * 2, lambda n: (repeated(n),), (4, 1, 6), {1, 2}),
    "the result of one program in the next": (lambda x: x.sin(), lambda n: (repeated(n),), VALUES, {1}),
    "a value that is made inside from an int": (
        lambda row, n: Repeat(row * 2, count=n).sin(),
        lambda n: (torch.randn(3), n),
        VALUES,
        {2},
    ),
}


@pytest.mark.parametrize("case", SERVED)
def test_few_programs_serve_every_value(case):
    fn, make, values, programs = SERVED[case]
    compiled, counter = counted(fn, "eager" if "by eager" in case else "aot_eager")
    for n in values:
        args = make(n)
        got, want = compiled(*args), fn(*args)
        assert_same(got, want)
        assert {type(value) for name, value in vars(got).items() if name in ("count", "length")} == {int}
        if "next" in case:
            assert_same(compiled(got), fn(want))
    assert counter.frame_count in programs


# ---- gradients ---------------------------------------------------------------------------------------------


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("fn", "after"),
    [
        (lambda x: torch.sum((x * 2).sin()), lambda y: y),
        (lambda x: torch.sum((x * 2).sin() * x.size(0)), lambda y: y),
        (lambda x: (x * 2).sin().sum() * 3, lambda y: y),
        (twice_sine, torch.sum),  # a wrapper that comes back has a wrapper as its tangent
        pytest.param(
            lambda x: torch.sum((x * 2).sin() * x.size(0)),
            lambda y: y + 0,
            marks=pytest.mark.slow,
            id="inductor",
        ),
    ],
)
def test_one_program_with_a_backward(fn, after, request):
    compiled, counter = counted(fn, "inductor" if "inductor" in request.node.name else "aot_eager")
    for n in VALUES:
        same_with_grads(
            lambda x: after(fn(x)), lambda x: after(compiled(x)), lambda leaf, n=n: Repeat(leaf, count=n)
        )
    assert counter.frame_count == 1


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
