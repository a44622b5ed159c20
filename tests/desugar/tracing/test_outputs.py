"""Writes to inputs, and results that are inputs or views: later writes and gradients behave as in eager mode."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from subclasses import inner
from tests.desugar.classes import Labeled, Nested, Pair, Tagged, TwoTensor, make, plain_parts
from tests.desugar.judge import (
    DOORS,
    WAYS,
    aliasing,
    by_pass,
    facts,
    identities,
    random_like,
    tensors_of,
    versions,
)
from tests.doors import by_torch
from tests.subclasses.subjects import declare

CLASSES = [Tensor, TwoTensor, Tagged, Pair, Labeled, Nested]
MODES = {"grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}

ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
classes = pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)

# ---- the scenario: call, look, write to the results, differentiate -------------------------------------------


def observe(tensors: list[Any], arguments: int) -> Any:
    """All visible facts of tensors: metadata, views of one another, aliasing, identities, versions, values.

    The record omits the version of a new tensor, and the base if nobody holds the base.
    """
    views = [[t._is_view() and read(lambda t=t: t._base) is other for other in tensors] for t in tensors]
    values = [read(lambda t=t: [part.detach().clone() for part in plain_parts(t)]) for t in tensors]
    found = [read(lambda t=t: facts(t)) for t in tensors]
    return found, views, aliasing(tensors), identities(tensors), versions(tensors[:arguments]), values


def read(action: Any, length: int = 60) -> Any:
    """A value, or the error that autograd answers with where a view has become stale."""
    try:
        return action()
    except RuntimeError as error:
        return str(error)[:length]


def play(fn: Any, args: tuple[Any, ...], later: str) -> list[Any]:
    """One side: the call, then a write to an argument or to the first result, then a backward."""
    result = fn(*args)
    tensors = tensors_of((args, result))
    seen = [observe(tensors, len(args))]
    target = {"argument": args[0], "result": tensors[-1]}.get(later)
    if target is not None:
        error = read(lambda: target.add_(1), 40)
        seen += [error if isinstance(error, str) else "fine", observe(tensors, len(args))]
    outs = [t for t in tensors_of(result) if read(lambda t=t: t.requires_grad) is True]
    if outs and later != "argument":
        leaves = [t for t in tensors if read(lambda t=t: t.is_leaf and t.requires_grad) is True]
        generator = torch.Generator().manual_seed(2)
        grads = [random_like(out, generator) for out in outs]
        found = read(lambda: torch.autograd.grad(outs, leaves, grads, allow_unused=True), 40)
        seen.append(found if isinstance(found, str) else [g if g is None else described(g) for g in found])
    return seen


def described(grad: Tensor) -> Any:
    return facts(grad), [part.clone() for part in plain_parts(grad)]


def assert_same(got: Any, want: Any, where: str = "") -> None:
    if isinstance(want, Tensor):
        torch.testing.assert_close(got, want, equal_nan=True)
    elif isinstance(want, (list, tuple)) and not isinstance(want, torch.Size):
        assert len(got) == len(want), where
        for n, (g, w) in enumerate(zip(got, want, strict=True)):
            assert_same(g, w, f"{where}.{n}")
    else:
        assert got == want, f"at {where}: got {got}, expected {want}"


def assert_plays_as_eager(fn: Any, make_args: Any, way: Any, later: str, mode: Any) -> None:
    compiled = way(fn)
    for _ in range(2):
        sides = []
        state = torch.get_rng_state()
        for function in (fn, compiled):
            torch.set_rng_state(state)
            with mode():
                sides.append(play(function, make_args(), later))
        assert_same(sides[1], sides[0])


# ---- writes --------------------------------------------------------------------------------------------------


WRITES = {
    "in place": lambda x, y: x.mul_(2),
    "in place and another result": lambda x, y: (x.mul_(2), x * y)[1],
    "the plain one": lambda x, y: (y.add_(1), x * y)[1],
    "both": lambda x, y: (y.add_(1), x.mul_(2), x * y)[2],
    "twice": lambda x, y: (x.mul_(2), x.add_(y), x * 3)[2],
    "to itself": lambda x, y: x.copy_(x),
    "a view": lambda x, y: (x.view(-1).mul_(2), x * y)[1],
    "a part": lambda x, y: (x[0].mul_(2), x * y)[1],
    "copy_": lambda x, y: (x.copy_(x * y), x + 1)[1],
    "zero_ and no result": lambda x, y: (x.zero_(), None)[1],
    "read before": lambda x, y: (lambda z: (x.mul_(2), z)[1])(x * y),
    "write what was there": lambda x, y: (x.mul_(1), x)[1],
}


METADATA = {
    "t_": lambda x, y: (x.t_(), x * 2)[1],
    "unsqueeze_": lambda x, y: (x.unsqueeze_(0), x * y)[1],
    "of the plain one": lambda x, y: (y.unsqueeze_(0), x * y)[1],
    "and a write": lambda x, y: (x.unsqueeze_(0), x.mul_(2), x)[2],
    "transposes": lambda x, y: (y.unsqueeze_(0), x.t_(), (x * 2).t_() + y)[2],
    "squeezes": lambda x, y: (x.squeeze_(0), x.mul_(2), x + y)[2],
}


@pytest.mark.sweep(32)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("mode", ["grad", "no_grad"])
@pytest.mark.parametrize("name", METADATA)
@pytest.mark.parametrize("cls", [Tensor, TwoTensor, Pair], ids=lambda c: c.__name__)  # Dynamo fails on Tagged
def test_sizes_and_strides_changed_in_place(name, cls, mode, grad, door):
    """The graph ends there."""
    rows = 1 if name == "squeezes" else 2
    make_args = lambda: (make(cls, rows, 3, grad=grad) * 1, torch.randn(3))  # noqa: E731
    assert_plays_as_eager(METADATA[name], make_args, DOORS[door], "argument", MODES[mode])


@pytest.mark.sweep(54)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WRITES)
@classes
def test_writes(name, cls, mode):
    if cls is Nested and name in ("a view", "a part") and mode == "inference":
        pytest.skip("eager mode cannot")
    assert_plays_as_eager(
        WRITES[name], lambda: (make(cls, 2, 3), torch.randn(3)), by_pass, "result", MODES[mode]
    )


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", WRITES)
def test_writes_behind_dynamo(name):
    assert_plays_as_eager(
        WRITES[name],
        lambda: (make(TwoTensor, 2, 3), torch.randn(3)),
        WAYS["dynamo"],
        "",
        contextlib.nullcontext,
    )


@pytest.mark.sweep(36)
@pytest.mark.parametrize("later", ["", "argument", "result"])
@pytest.mark.parametrize("name", ["in place", "in place and another result", "a part", "read before", "both"])
@classes
def test_writes_to_what_has_a_gradient(name, cls, later):
    """The argument is a non-leaf, as eager mode requires."""

    def make_args():
        leaf = make(cls, 2, 3, grad=True)
        return leaf * 1, torch.randn(3), leaf

    fn = WRITES[name]
    assert_plays_as_eager(lambda x, y, leaf: fn(x, y), make_args, by_pass, later, contextlib.nullcontext)


def test_writing_to_a_leaf_is_eagers_error():
    x = make(TwoTensor, 2, 3, grad=True)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        by_pass(lambda x: x.mul_(2))(x)
    assert x._version == 0


# ---- results that are views ----------------------------------------------------------------------------------

VIEWS = {
    "view": lambda x: x.view(3, 2),
    "transposed": lambda x: x.t(),
    "part": lambda x: (x * 2, x[0]),
    "reshape that changes nothing": lambda x: x.reshape(2, 3),
    "detach": lambda x: (x * 2, x.detach()),
    "view of a view": lambda x: x.t()[1:],
    "two views of an intermediate": lambda x: (lambda y: (y.t(), y[0]))(x * 2),
    "an intermediate and its view": lambda x: (lambda y: (y, y.view(-1)))(x * 2),
    "split": lambda x: (x * 2).split(1),
    "split of the argument": lambda x: x.split(1),
    "expand": lambda x: x.expand(4, 2, 3),
    "itself": lambda x: x,
    "itself twice": lambda x: (x * 2, x, x),
    "alias made without grad": torch.no_grad()(lambda x: x.view(-1)),
    "a view written to inside": lambda x: (lambda y: (y[0].mul_(2), y.t())[1])(x * 2),
}


@pytest.mark.sweep(120)
@pytest.mark.parametrize(
    ("mode", "later"),
    [("grad", ""), ("grad", "argument"), ("grad", "result"), ("no_grad", "result"), ("inference", "result")],
)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("cls", [Tensor, TwoTensor, Pair], ids=lambda c: c.__name__)
def test_views(name, cls, grad, mode, later):
    def make_args():
        x = make(cls, 2, 3, grad=grad)
        return (x * 1,) if later == "argument" and grad and mode == "grad" else (x,)

    assert_plays_as_eager(VIEWS[name], make_args, by_pass, later, MODES[mode])


BITS = {
    "of the argument": lambda x, dtype: x.view(dtype),
    "a part of them": lambda x, dtype: (x * 2, x.view(dtype)[0]),
    "beside the argument": lambda x, dtype: (x, x.view(dtype), x.view(torch.uint8)),
    "of an intermediate": lambda x, dtype: (lambda y: (y.view(dtype), y))(x * 2),
    "two of an intermediate": lambda x, dtype: (lambda y: (y.view(dtype), y.view(torch.uint8)[1:]))(x * 2),
    "there and back": lambda x, dtype: x.view(dtype).view(x.dtype),
    "after a write": lambda x, dtype: (x.detach().mul_(2), x.view(dtype))[1],
}


@pytest.mark.sweep(48)
@pytest.mark.parametrize(("mode", "grad"), [("grad", True), ("no_grad", True), ("inference", False)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("cls", [Tensor, Pair], ids=lambda c: c.__name__)
def test_the_same_bits_as_another_dtype(name, dtype, cls, grad, mode):
    """No views to autograd, so that nothing but the memory tells of it."""
    assert_plays_as_eager(
        lambda x: BITS[name](x, dtype), lambda: (make(cls, 2, 4, grad=grad),), by_pass, "result", MODES[mode]
    )


@ways
@pytest.mark.parametrize("dtypes", [(torch.float8_e5m2, torch.uint8), (torch.uint8, torch.int8)], ids=str)
def test_the_bits_of_small_numbers(dtypes, way):
    fn = lambda x: x.view(dtypes[1])  # noqa: E731
    x = torch.arange(6.0).view(2, 3).to(dtypes[0])
    got = way(fn)(x)
    assert got.dtype == dtypes[1] and torch.equal(got, fn(x)) and got.data_ptr() == x.data_ptr()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_argument(name):
    """The argument is a view itself: a write to its result reaches the base."""

    def make_args():
        base = make(TwoTensor, 4, 3)
        return base[1:3], base

    fn = VIEWS[name]
    assert_plays_as_eager(lambda x, base: fn(x), make_args, by_pass, "result", contextlib.nullcontext)


@pytest.mark.parametrize(
    ("fn", "build"),
    [
        (lambda p: p.add_(1), lambda t: (Pair(t, t),)),
        (lambda p, t: (t.add_(1), p * 2)[1], lambda t: (Pair(t, torch.ones(2, 3)), t)),
        (lambda p, t: (p.add_(1), t * 2)[1], lambda t: (Pair(t, torch.ones(2, 3)), t)),
    ],
)
def test_a_tensor_in_several_places_has_one_counter(fn, build):
    sides = []
    for function in (fn, by_pass(fn)):
        args = build(torch.ones(2, 3))
        function(*args)
        sides.append(versions([*args, args[0].a, args[0].b]))
    assert sides[0] == sides[1]


def test_a_class_is_told_of_views_that_are_taken_again():
    told = []
    telling = declare(keywords={"fallback": "map"}, took_view=lambda self, view: told.append((self, view)))
    x = telling(torch.arange(6.0)).requires_grad_()
    view, _ = by_pass(lambda x: (x[2:], x * 2))(x)
    assert [(base is x, seen is view) for base, seen in told] == [(True, True)]


# ---- a plain view of a wrapper -----------------------------------------------------------------------------


# A row of it is a plain tensor.
Series = declare(
    v=inner(differentiable=True),
    wrap_cotangent=lambda self, cotangent: Series(cotangent),
    rules={torch.ops.aten.select.int: lambda func, x, dim, index: func(x.v, dim, index)},
)


@pytest.mark.parametrize("way", [by_pass, by_torch])
def test_a_plain_view_of_a_wrapper_made_inside_keeps_its_gradient(way):
    run, s = way(lambda s: Series(s)[1]), torch.ones(3, 2, requires_grad=True)
    assert torch.autograd.grad(run(s).sum(), s)[0].tolist() == [[0, 0], [1, 1], [0, 0]]
    assert torch.equal(run(torch.ones(3, 2)), torch.ones(2))
