"""Hooks of a class that torch.compile calls: guards, tangents, cache keys, dynamic ints; torch calls each of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from subclasses import Outer, dynamic, inner, static
from subclasses.methods.compile_cache import describe_value, fingerprint
from tests.subclasses.subjects import (
    FACTORIES,
    MODES,
    Nested,
    Pair,
    Rows,
    Scaled,
    Tagged,
    assert_same,
    counted,
    declare,
    make_int8,
    make_pair,
)

ROOT = Path(__file__).parents[2]


# ---- every kind of class, in and out -----------------------------------------------------------------------


def check_backward(compiled, fn, kind):
    x = FACTORIES[kind]().requires_grad_()
    y = x.detach().clone().requires_grad_()
    out, expected = compiled(x), fn(y)
    assert_same(out.detach(), expected.detach())
    torch.sum(out).backward()
    torch.sum(expected).backward()
    assert_same(x.grad, y.grad)


def doubled(x):
    return (x * 2).sin() + x


# The sum of rows that are all one row is not the sum of that row.
KINDS = [k for k in FACTORIES if k not in ("hostile", "rows")]


# A normal run tries these; all other pairs are slow.
NORMAL = {("pair", "aot_eager"), ("nested", "aot_eager"), ("optional, there", "aot_eager"), ("int8", "eager")}


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        pytest.param(kind, backend, marks=() if (kind, backend) in NORMAL else pytest.mark.slow)
        for kind in KINDS
        for backend in ("eager", "aot_eager", "inductor")
    ],
)
def test_forward_and_backward(kind, backend):
    check_backward(torch.compile(doubled, backend=backend, fullgraph=True), doubled, kind)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", FACTORIES)
def test_a_wrapper_passes_through(kind):
    x = FACTORIES[kind]()
    out = torch.compile(lambda x, t: (x, t + 1), backend="aot_eager", fullgraph=True)(x, torch.ones(2))
    assert out[0] is x


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", ["pair", "tagged", "nested", "rows"])
def test_sizes_that_change(kind):
    compiled, counter = counted(lambda x: x * 2 + 1)
    for n in (5, 7, 9, 4):
        x = FACTORIES[kind]()
        x = torch.cat([x] * n, -1) if kind != "rows" else type(x)(torch.randn(n), count=2)
        assert_same(compiled(x), x * 2 + 1)
    assert counter.frame_count <= 2


# ---- metadata guards ---------------------------------------------------------------------------------------


def test_metadata_is_guarded_by_identity(monkeypatch):
    asked = []
    original = Tagged.__metadata_guard__

    def spy(cls, saved, now):
        asked.append((saved, now))
        return original(saved, now)

    monkeypatch.setattr(Tagged, "__metadata_guard__", classmethod(spy))
    compiled, counter = counted(lambda x: x * 2)
    for tag in ("a", "b", "a", "b"):
        x = Tagged(torch.ones(3), tag=tag)
        assert_same(compiled(x), x * 2)
    assert counter.frame_count == 2
    assert asked and all(type(p).__name__ == "Layout" for pair in asked for p in pair)


Holding = declare(name="Holding", keywords={"fallback": "map"})
# Values, and how many programs serve them.
GUARDED = {
    "equal but other metadata": (
        [lambda: Tagged(torch.ones(3), tag="".join(["t", "ag"]))] * 3,
        1,
    ),
    "one and true": ([lambda m=m: Tagged(torch.ones(3), mode=m) for m in (1, True, 1.0)], 3),
    "an inner tensor that comes and goes": (
        [FACTORIES["optional, absent"], FACTORIES["optional, there"]] * 2,
        2,
    ),
    "nested metadata": (
        [
            lambda: Holding(torch.ones(3)),
            lambda: Holding(Tagged(torch.ones(3), tag="a")),
            lambda: Holding(Tagged(torch.ones(3), tag="b")),
        ],
        3,
    ),
}


@pytest.mark.parametrize("case", GUARDED)
def test_metadata_is_guarded(case):
    factories, programs = GUARDED[case]
    compiled, counter = counted(lambda x: x * 2)
    for make in factories:
        x = make()
        assert_same(compiled(x), x * 2)
    assert counter.frame_count == programs


# ---- tangents ----------------------------------------------------------------------------------------------


# The class and the method, and code for which torch calls it.
CALLED = {
    "coercion at trace time": (
        *(Scaled, "__coerce_tangent_metadata__"),
        lambda: torch.compile(lambda x: x.clone(), backend="aot_eager")(
            Scaled(torch.ones(3), torch.tensor(2.0)).requires_grad_()
        ),
    ),
    "the cache asks for a key, and does not warn": (
        *(Pair, "_stable_hash_for_caching"),
        lambda: torch.compile(lambda x: x * 3, fullgraph=True)(make_pair(3, 5)),
    ),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if "cache" in case else ()) for case in CALLED]
)
def test_a_method_is_called(case, monkeypatch):
    cls, name, run = CALLED[case]
    called, original = [], getattr(cls, name)
    monkeypatch.setattr(cls, name, lambda self: (called.append(self), original(self))[1])
    run()
    assert called


def test_coercion_at_run_time_is_called():
    def coerce(self, metadata, expected_type=None):
        called.append(self.mood)
        return Moody(self.held, mood=metadata.statics[0])

    called = []
    Moody = declare(
        keywords={"fallback": "map"},
        held=inner(),
        mood=static(default="calm"),
        __coerce_same_metadata_as_tangent__=coerce,
    )
    x = Moody(torch.ones(3)).requires_grad_()
    torch.compile(lambda x: x * 2, backend="aot_eager")(x).backward(Moody(torch.ones(3), mood="cross"))
    assert called[0] == "cross" and x.grad.held.tolist() == [2, 2, 2]


# ---- cache keys --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_second_compilation_is_found_in_the_cache():
    def misses():
        return counters["aot_autograd"]["autograd_cache_miss"]

    x = make_pair(2, 9)
    torch.compile(lambda x: x * 4.5, fullgraph=True)(x)
    torch.compiler.reset()
    before, hits = misses(), counters["aot_autograd"]["autograd_cache_hit"]
    assert_same(torch.compile(lambda x: x * 4.5, fullgraph=True)(x), x * 4.5)
    assert misses() == before and counters["aot_autograd"]["autograd_cache_hit"] == hits + 1


DIFFERENT = [
    lambda: make_pair(3, 4),
    lambda: make_pair(4, 3),
    lambda: make_pair(4, 3).t(),
    lambda: make_pair(3, 4).double(),
    lambda: make_pair(3, 4).requires_grad_(),
    lambda: make_pair(3, 4).to("meta"),
    lambda: Nested(make_pair(), torch.ones(3, 4)),
    lambda: Nested(make_pair(), make_pair()),
    lambda: Tagged(torch.ones(3, 4)),
    lambda: Tagged(torch.ones(3, 4), tag="t"),
    lambda: Tagged(torch.ones(3, 4), mode=1),
    lambda: Tagged(torch.ones(3, 4), mode=True),
    lambda: Tagged(torch.ones(3, 4), length=2),
    lambda: FACTORIES["optional, absent"](),
    lambda: FACTORIES["optional, there"](),
    lambda: make_int8(),
    lambda: make_int8(axis=1),
]


def test_keys_are_equal_for_equal_metadata_and_differ_for_different():
    keys = [make()._stable_hash_for_caching() for make in DIFFERENT]
    assert keys == [make()._stable_hash_for_caching() for make in DIFFERENT]
    assert len(set(keys)) == len(keys)


@pytest.mark.slow
def test_keys_are_equal_in_every_process():
    code = (
        "from tests.subclasses.test_compile_hooks import DIFFERENT; "
        "print(*[make()._stable_hash_for_caching() for make in DIFFERENT])"
    )
    expected = [make()._stable_hash_for_caching() for make in DIFFERENT]
    for seed in ("1", "2"):
        out = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert out.stdout.split() == expected


def test_descriptions_of_metadata():
    values = [
        1, True, 1.0, "1", b"1", None, (1,), (1.0,), ((),), frozenset({1}), frozenset({"a", "b"}), torch.float32,
        torch.float64, torch.device("cpu"), torch.strided, int, len, describe_value, torch.Size([1]), 1 + 2j, range(3),
    ]  # fmt: skip
    assert len({describe_value(v) for v in values}) == len(values)
    assert describe_value(frozenset({"b", "a"})) == describe_value(frozenset({"a", "b"}))


def test_a_rule_that_comes_later_changes_the_key():
    box = declare(keywords={"fallback": "map"})
    x = box(torch.ones(2))
    before = x._stable_hash_for_caching()
    assert fingerprint(box) == fingerprint(box)
    box.implements(torch.ops.aten.cos.default)(lambda func, x: x)
    assert x._stable_hash_for_caching() != before


# ---- dynamic ints: right, and no program for each new value ----------------------------------------------------

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
    """Runs both on fresh values of one seed; compares the results and the gradient of the leaf behind the values."""
    found = []
    for run in (fn, compiled):
        torch.manual_seed(1)
        leaf = torch.randn(3, requires_grad=True)
        out = run(make(leaf))
        (out if out.dim() == 0 else out.sum()).backward()
        found.append((out.detach(), leaf.grad))
    for pair in zip(*found, strict=True):
        assert_same(*pair)


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
