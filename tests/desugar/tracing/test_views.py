"""Results that are views of an inner tensor of an argument: what eager mode says of them holds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import desugar
from subclasses import TensorSubclass, inner
from subclasses.ragged import JaggedTensor

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


def pair(grad, leaf=True):
    torch.manual_seed(0)
    x = Pair(torch.randn(6, 3), torch.randn(6, 3)).requires_grad_(grad)
    return x if leaf or not grad else x * 1


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


def describe(results, x):
    storages = [x._raw_a.untyped_storage().data_ptr(), x.b.untyped_storage().data_ptr()]
    for t in results:
        for plain in t.unwrap() if isinstance(t, Pair) else [t]:
            shares = storages.index(s) if (s := plain.untyped_storage().data_ptr()) in storages else None
            is_view = shares is not None and t._is_view()  # of the argument
            yield shares, t.requires_grad, is_view, tuple(t.shape), t.stride()


@pytest.mark.sweep(12)
@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize("fn", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize(("grad", "leaf"), [(True, True), (True, False), (False, True)])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_what_results_are(door, fn, grad, leaf):
    compiled = door(fn)
    for _ in range(2):
        x, y = pair(grad, leaf), pair(grad, leaf)
        expected, got = fn(x), compiled(y)
        if leaf:
            assert list(describe(got, y)) == list(describe(expected, x))
        torch.testing.assert_close(
            [t.to_dense() if isinstance(t, Pair) else t for t in got if type(t) is Tensor],
            [t for t in expected if type(t) is Tensor],
        )
        if any(t.requires_grad for t in expected):
            leaves = []
            for value, results in ((x, expected), (y, got)):
                total = sum((t.unwrap("a") if isinstance(t, Pair) else t).square().sum() for t in results)
                leaves.append(torch.autograd.grad(total, value, allow_unused=True)[0])
            ours, theirs = leaves[1], leaves[0]
            torch.testing.assert_close([ours.a, ours.b], [theirs.a, theirs.b])


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_a_write_to_a_part_is_refused_where_eager_mode_refuses_it(door):
    x = pair(True)
    squares = x * x
    part = door(lambda x: [x.unwrap("a")[1:3]])(x)[0]
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        part.mul_(2)
    squares.unwrap("a").sum().backward()
    assert x.grad.a.equal(2 * x._raw_a)


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_a_write_to_a_part_is_noticed(door):
    x = pair(False)
    weight = torch.ones(6, 3, requires_grad=True)
    y = weight * x._raw_a
    part = door(lambda x: [x.unwrap("a")[1:3]])(x)[0]
    before = x._raw_a.clone()
    part.mul_(2)
    assert x._raw_a[1:3].equal(2 * before[1:3])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_of_a_detached_value(door):
    got = door(lambda x: [x.detach().unwrap("a")[1:3]])(y := pair(True))[0]
    assert got.equal(y._raw_a[1:3]) and not got.requires_grad


@pytest.mark.sweep(2)
@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize("grad", [True, False])
def test_of_nested_values(door, grad):
    def parts(x):
        return [x.unwrap("pair").unwrap("a")[1:3], x.unwrap("pair").unwrap("b").t()]

    def make():
        torch.manual_seed(1)
        return Outer(Pair(torch.randn(4, 2), torch.randn(4, 2))).requires_grad_(grad)

    x, y = make(), make()
    expected, got = parts(x), door(parts)(y)
    torch.testing.assert_close(got, expected)
    if grad:
        for results in (expected, got):
            sum(n * t.sum() for n, t in enumerate(results, 2)).backward()
        torch.testing.assert_close([*y.grad.pair.unwrap()], [*x.grad.pair.unwrap()])


class Scaled(torch.autograd.Function):
    """A view whose gradient is another one than that of a view."""

    @staticmethod
    def forward(ctx, t):
        return t.view_as(t)

    @staticmethod
    def backward(ctx, grad):
        return grad * 10


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_a_view_with_a_gradient_of_its_own(door):
    def fn(x):
        return Scaled.apply(x.unwrap("a"))[1:3]

    x, y = pair(True), pair(True)
    fn(x).sum().backward()
    door(fn)(y).sum().backward()
    assert y.grad.a.equal(x.grad.a) and x.grad.a.max() == 10


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_after_a_write(door):
    def written(x):
        x.mul_(2)
        return x.unwrap("a")[1:3]

    x, y = pair(False), pair(False)
    torch.testing.assert_close(door(written)(y), written(x))
    torch.testing.assert_close([*y.unwrap()], [*x.unwrap()])


def test_rows_of_ever_new_lengths_are_one_program():
    compiled = DOORS["desugar.compile"](lambda x: [x.values[1:], x.values.t()])
    for lengths in ((2, 4), (3, 5), (9, 2)):
        x = JaggedTensor.from_tensors([torch.randn(n, 3) for n in lengths]).requires_grad_()
        tail, across = compiled(x)
        assert tail.equal(x.values[1:]) and across.equal(x.values.t()) and across._is_view()
    assert len(compiled.programs) == 1
