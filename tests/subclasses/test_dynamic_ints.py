"""Dynamic ints under stock torch.compile: right, and no program for each new value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import desugar
from subclasses import Outer, TensorSubclass, dynamic, inner
from tests.subclasses.subjects import Rows, Tagged, assert_same

VALUES = (5, 7, 2, 30, 11)


class Repeat(TensorSubclass):
    """``count`` equal rows, with a rule of each kind."""

    row: Tensor = inner()
    count: int = dynamic()

    @staticmethod
    def outer(row: Tensor, count: int) -> Outer:
        return Outer((count, *row.shape))


@Repeat.implements(torch.Tag.pointwise)
def _(func, *args, **kwargs):
    x = next(a for a in args if isinstance(a, Repeat))
    rows = [a.row if isinstance(a, Repeat) else a for a in args]
    return Repeat(func(*rows, **kwargs), count=x.count)


@Repeat.implements(torch.sum)
def _(func, x):
    return x.unwrap("row").sum() * x.count


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


def test_one_program_where_the_outer_size_follows():
    compiled, counter = counted(lambda x: (x * 2).sin() * x.size(0))
    for n in VALUES:
        x = Repeat(torch.randn(3), count=n)
        assert_same(compiled(x), (x * 2).sin() * n)
    assert counter.frame_count == 1


def test_a_value_read_inside_takes_at_most_two_programs():
    compiled, counter = counted(lambda x: (x * 2) * x.count)
    for n in VALUES:
        x = Repeat(torch.randn(3), count=n)
        assert_same(compiled(x), (x * 2) * n)
    assert counter.frame_count == 2


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


@pytest.mark.parametrize("n", [0, 1])
def test_zero_and_one_may_have_programs_of_their_own(n):
    compiled, counter = counted(lambda x: x * 2)
    for count in (4, n, 6):
        x = Repeat(torch.randn(3), count=count)
        assert_same(compiled(x), x * 2)
    assert counter.frame_count <= 2


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


def test_what_one_program_returns_goes_into_the_next():
    compiled, counter = counted(lambda x: x.sin())
    for n in VALUES:
        x = Repeat(torch.randn(3), count=n)
        assert_same(compiled(compiled(x)), x.sin().sin())
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


class Stepped(TensorSubclass, fallback="map"):
    live: Tensor = inner()
    step: int = dynamic()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("compile_with", [("desugar", "eager"), ("stock", "aot_eager")])
@pytest.mark.parametrize("write", [Tensor.copy_, Tensor.add_])
def test_a_write_of_another_int_is_refused_by_a_program_too(write, compile_with):
    """A program was made for values of equal ints; later ones had others, and were copied in silence."""
    door, backend = compile_with

    def fn(x, y):
        write(y, x)
        return y * 1

    compiled = (desugar.compile if door == "desugar" else torch.compile)(fn, backend=backend)
    for step in (1, 3, 1, 7):
        x, y = Stepped(torch.ones(2), step=step), Stepped(torch.zeros(2), step=1)
        if step == 1:
            assert compiled(x, y).live.tolist() == y.live.tolist() == [1, 1]
            continue
        with pytest.raises(Exception, match=r"another step: expected 1, got|with different metadata"):
            fn(x, y)
        with pytest.raises(Exception, match=r"another step: expected|with different metadata"):
            compiled(x, y)
        assert y.live.tolist() == [0, 0]
