"""Results that are views of an argument's inner tensor, or that hold such views, behave as in eager mode."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import desugar
from desugar.errors import PackageError
from subclasses import TensorSubclass, inner
from subclasses.int8 import Int8Tensor
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.desugar.classes import Nested, Pair, autograd_function, plain_parts
from tests.desugar.judge import BACKEND_DOORS, STRICT_DOORS, by_pass, inside, judge, leaves_of
from tests.desugar.tracing.test_outputs import assert_plays_as_eager

DOORS = {name: functools.partial(door, fullgraph=True) for name, door in STRICT_DOORS.items()}


class Both(TensorSubclass, fallback="map"):
    a: Tensor = inner(differentiable=True)
    b: Tensor = inner()


class Outer(TensorSubclass, fallback="map"):
    pair: Tensor = inner()


def pair(grad):
    return Both(torch.randn(6, 3), torch.randn(6, 3)).requires_grad_(grad)


FUNCTIONS = {
    "a part": lambda x: [x.unwrap("a")[1:3]],
    "two parts": lambda x: list(x.unwrap("b").split([2, 4])),
    "overlapping parts": lambda x: [x.unwrap("a")[:4], x.unwrap("a")[2:]],
    "transposed": lambda x: [x.unwrap("a").t()],
    "whole": lambda x: [x.unwrap("a")],
    "a field": lambda x: [x.a, x.a[2]],
    "a raw field": lambda x: [x.b[1:3], x.b.view(-1)],
    "of both": lambda x: [x.unwrap("a")[1], x.unwrap("b")[1], x * 2],
    "without gradient inside": torch.no_grad()(lambda x: [x.unwrap("b")[1:3]]),
    "beside a result": lambda x: [x.a[1:3], (x * 3).unwrap("a")],
}


def views_of(results, x):
    """Which results share the memory of an argument and are views."""
    storages = [part.untyped_storage().data_ptr() for part in (x._raw_a, x.b)]
    plain = [t for t in results if not isinstance(t, Both)]
    return [t._is_view() for t in plain if t.untyped_storage().data_ptr() in storages]


@pytest.mark.sweep(24)
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

    assert_plays_as_eager(
        lambda x, raw: FUNCTIONS["a part"](x), make_args, door, "result", contextlib.nullcontext
    )


# A view with its own formula for the gradient.
scaled = autograd_function(lambda ctx, t: t.view_as(t), lambda ctx, grad: grad * 10)


def of_nested(x):
    return [x.unwrap("pair").unwrap("a")[1:3], x.unwrap("pair").unwrap("b").t()]


OTHERS = {
    "a gradient of its own": (lambda x: scaled(x.unwrap("a"))[1:3], lambda: pair(True)),
    "after a write": (lambda x: (x.mul_(2), x.unwrap("a")[1:3])[1], lambda: pair(False)),
    "of a detached value": (lambda x: x.detach().unwrap("a")[1:3], lambda: pair(True)),
    "nested": (of_nested, lambda: Outer(pair(False))),
    "nested, with a gradient": (of_nested, lambda: Outer(pair(False)).requires_grad_()),
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


# ---- views of an argument that the function writes to, held by new wrappers ----------------------------------

PAIR = lambda: Pair(torch.arange(6.0).view(2, 3), torch.ones(2, 3))  # noqa: E731
ROWS = lambda: JaggedTensor(torch.arange(10.0).view(5, 2), torch.tensor([0, 2, 5]), max_length=3)  # noqa: E731


def in_other_memory(x):
    y = x * 2
    x.copy_(y)
    return Pair(y.a[1:], y.b[1:])


CASES = {
    "another shape": (PAIR, lambda x: (x.add_(1), Pair(x.a.view(-1), x.b.view(-1)))[1]),
    "a write to one": (PAIR, lambda x: (x.a.add_(1), Pair(x.a[1:], x.b[1:]))[1]),
    "aliases": (PAIR, lambda x: (x.add_(1), Pair(torch.ops.aten.alias(x.a), x.b))[1]),
    "a copy": (PAIR, in_other_memory),
    "beside a view": (PAIR, lambda x: (x.add_(1), Pair(x.a.view(-1), x.b.view(-1)), x[1:])[1:]),
    "no write": (PAIR, lambda x: Pair(x.a.view(-1), x.b.view(-1))),
    "shorter rows": (ROWS, lambda x: (x.add_(1), x[:, :-1])[1]),
    "some rows": (ROWS, lambda x: (x.mul_(2), x[1:])[1]),
    "a write to some entries": (ROWS, lambda x: (x.__setitem__((slice(None), -1), 9.0), x[:, :-1])[1]),
}


def play(fn, make):
    """The values in the results, and the values in the arguments after writes to the results."""
    seen = []
    for _ in range(2):
        x = make()
        results = fn(x)
        for y in results if isinstance(results, tuple) else (results,):
            seen += [t.clone() for t in plain_parts(y)]
            y.add_(100)
        seen += plain_parts(x)
    return seen


@pytest.mark.sweep(12)
@pytest.mark.parametrize("door", BACKEND_DOORS)
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_a_write_to_the_result_reaches_the_argument(case, backend, door):
    make, fn = CASES[case]
    strict = {"strict": True} if door == "desugar.compile" else {}
    torch.testing.assert_close(play(BACKEND_DOORS[door](fn, backend=backend, **strict), make), play(fn, make))


def test_an_argument_in_another_memory_order_than_its_new_value_is_left_to_pytorch():
    x = Pair(torch.arange(12.0).view(2, 6)[:, ::2], torch.ones(2, 6)[:, ::2])
    compiled = STRICT_DOORS["desugar.compile"](lambda x: (x.add_(1), Pair(x.a[1:], x.b[1:]))[1])
    with pytest.raises(desugar.DesugarError, match="in another memory order"):
        compiled(x)


# ---- detached views of an argument: `x[1:].detach()`, and views of them ---------------------------------------------

DETACHED_DOORS = STRICT_DOORS


def after_a_write(x):
    part = x[1:]
    x.add_(1)
    x.mul_(2)
    return part.detach(), part


DETACHED_FUNCTIONS = {
    "rows": lambda x: x[1:].detach(),
    "a row": lambda x: x[0].detach(),
    "another shape": lambda x: (x.view(3, 2).detach(), x * 2),
    "transposed": lambda x: torch.detach(x.t()),
    "expanded": lambda x: x.expand(2, 2, 3).detach(),
    "a view of it": lambda x: x[:, 1:].detach()[0],
    "twice": lambda x: x[:, 1:].detach()[:1].detach(),
    "both, and the view": lambda x: (x[1:], x[1:].detach(), x[1:].detach()[0]),
    "the same one twice": lambda x: [x.t().detach()] * 2,
    "by the op": lambda x: torch.ops.aten.detach.default(x[1:]),
    "beside a result": lambda x: (x[1:].detach(), (x * 2).sum()),
    "after a write": after_a_write,
    "without gradients": torch.no_grad()(lambda x: (x[1:].detach(), x * 2)),
    "written to": lambda x: (lambda part: (part.mul_(2), part, x * 1)[1:])(x[1:].detach()),
}
ARGUMENTS = {
    "plain": lambda: torch.randn(2, 3),
    "by hand": lambda: TwoTensor(torch.randn(2, 3), torch.randn(2, 3)),
    "declared": lambda: Pair(torch.randn(2, 3), torch.randn(2, 3)),
    "nested": lambda: Nested(Pair(torch.randn(2, 3), torch.randn(2, 3)), torch.randn(2, 3)),
}
makers = pytest.mark.parametrize("make", [ARGUMENTS[name] for name in ("plain", "by hand", "declared")])


@pytest.mark.sweep(72)
@pytest.mark.parametrize("door", DETACHED_DOORS)
@pytest.mark.parametrize("grad", ["none", "non-leaf"])
@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("name", DETACHED_FUNCTIONS)
def test_it_is_taken_again(name, argument, grad, door):
    def make():
        x = ARGUMENTS[argument]()
        return (x if grad == "none" else x.requires_grad_() * 1,)

    fn = DETACHED_FUNCTIONS[name]
    compiled = judge(fn, make, way=DETACHED_DOORS[door], calls=2)
    expected, got = ([t._is_view() for t in leaves_of(f(*make()))] for f in (fn, compiled))
    assert got == expected


@pytest.mark.sweep(2)
@pytest.mark.parametrize("door", DETACHED_DOORS)
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_a_write_to_the_result_reaches_the_argument_detached(argument, door):
    assert_plays_as_eager(
        DETACHED_FUNCTIONS["a view of it"],
        lambda: (ARGUMENTS[argument](),),
        DETACHED_DOORS[door],
        "result",
        contextlib.nullcontext,
    )


@pytest.mark.parametrize("door", DETACHED_DOORS)
@pytest.mark.parametrize(
    ("build", "fn"),
    [
        (lambda rows: Int8Tensor.from_float(rows[0]), lambda x: x[1:].detach()),
        (lambda rows: Int8Tensor.from_float(rows[0]), lambda x: x.t().detach()),
        (JaggedTensor.from_tensors, lambda x: x.transpose(-1, -2).detach()),
        (PaddedTensor.from_tensors, lambda x: x[1:].detach()),
    ],
)
def test_the_classes_of_the_library(build, fn, door):
    x = build([torch.randn(n, 8) for n in (4, 0, 3)])
    got, expected = DETACHED_DOORS[door](fn)(x), fn(x)
    assert type(got) is type(expected) and got.shape == expected.shape
    for one, other in zip(leaves_of(got.unwrap()), leaves_of(expected.unwrap()), strict=True):
        assert one is other is None or one.equal(other)
        assert one is None or one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@pytest.mark.slow
def test_a_package_refuses_it(tmp_path):
    with pytest.raises(PackageError, match="return a clone"):
        desugar.save(tmp_path / "views.pt2", lambda x: (x[1:].detach(), x * 2), desugar.call(torch.ones(3)))


# ---- written to with gradients, which PyTorch's own compiler loses -----------------------------------------------


def added_beside_it(x, y):
    base = x * 1
    return base, WRITTEN["it"](base, y)


WRITTEN = {
    "it": lambda x, y: x.detach().add_(y),
    "rows": lambda x, y: x[1:].detach().add_(y[1:]),
    "a view of it": lambda x, y: x.detach()[1].add_(y[1]),
    "below a result": lambda x, y: (lambda part: (part[1].add_(y[1]), part)[1])(x.detach()),
}


@pytest.mark.sweep(18)
@makers
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("strict", [True, False])
def test_a_result_that_would_lose_a_gradient_is_refused(name, make, strict):
    x, y = make().requires_grad_(), make().requires_grad_()
    before = x.detach().clone()
    for door in (by_pass, functools.partial(inside, backend="eager", strict=strict)):
        with pytest.raises(Exception, match=r"would lose the gradient of that write[\s\S]*clone\(\)"):
            door(WRITTEN[name])(x, y)
    assert all(map(torch.equal, leaves_of(x.detach()), leaves_of(before))), "nothing is written"
    # No write that autograd records: the second operand has no gradient.
    judge(WRITTEN[name], lambda: (make().requires_grad_(), make()))


@pytest.mark.sweep(3)
@makers
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: x.detach().add_(y).clone(),
        lambda x, y: x.clone().detach().add_(y),
        lambda x, y: x.detach().add_(y) * 2,
    ],
)
def test_a_clone_of_it_keeps_the_gradient(make, fn):
    """As the error says, and where no result shares memory with an argument."""
    judge(fn, lambda: (make().requires_grad_(), make().requires_grad_()))


@makers
def test_beside_another_result_the_graph_goes_to_pytorch(make):
    args = make().requires_grad_(), make().requires_grad_()
    sides = [fn(*args) for fn in (by_pass(added_beside_it), added_beside_it)]
    assert sides[0][1].requires_grad == sides[1][1].requires_grad
    assert all(map(torch.equal, *(leaves_of([t.detach() for t in side]) for side in sides)))
