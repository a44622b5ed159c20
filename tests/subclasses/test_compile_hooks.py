"""What torch.compile asks of a class: guards, tangents, cache keys; each seen to be called by torch itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from subclasses import TensorSubclass, inner, static
from subclasses.generate.compile_cache import describe_value, fingerprint
from tests.subclasses.subjects import (
    FACTORIES,
    Nested,
    Pair,
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


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", [k for k in FACTORIES if k != "hostile"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_forward(kind, backend):
    x = FACTORIES[kind]()
    assert_same(torch.compile(lambda x: (x * 2).sin(), backend=backend, fullgraph=True)(x), (x * 2).sin())


def check_backward(compiled, fn, kind):
    x = FACTORIES[kind]().requires_grad_()
    y = x.detach().clone().requires_grad_()
    out, expected = compiled(x), fn(y)
    assert_same(out.detach(), expected.detach())
    torch.sum(out).backward()
    torch.sum(expected).backward()
    assert_same(x.grad, y.grad)


# The sum of rows that are all one row is not the sum of that row.
@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", [k for k in FACTORIES if k not in ("hostile", "rows")])
def test_backward(kind):
    def fn(x):
        return torch.sum((x * 2).sin())

    check_backward(torch.compile(fn, backend="aot_eager", fullgraph=True), fn, kind)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kind", ["pair", "nested", "optional, absent", "tagged"])
def test_inductor(kind):
    def fn(x):
        return (x * 2).sin() + x

    check_backward(torch.compile(fn, fullgraph=True), fn, kind)


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


# The class and the method, and what makes torch call it.
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


def test_coercion_at_run_time_is_called(monkeypatch):
    class Moody(TensorSubclass, fallback="map"):
        held: Tensor = inner()
        mood: str = static(default="calm")

        def __coerce_same_metadata_as_tangent__(self, metadata, expected_type=None):
            called.append((self.mood, metadata))
            return Moody(self.held, mood=metadata.statics[0])

    called = []
    x = Moody(torch.ones(3)).requires_grad_()
    y = torch.compile(lambda x: x * 2, backend="aot_eager")(x)
    y.backward(Moody(torch.ones(3), mood="cross"))
    assert called and called[0][0] == "cross"
    assert x.grad.held.tolist() == [2, 2, 2]


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
