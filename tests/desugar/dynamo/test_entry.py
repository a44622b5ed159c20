"""The generated entry: the function's own parameters, Dynamo's guards, and what goes another way."""

from __future__ import annotations

import functools
import gc
import inspect
import weakref

import pytest
import torch

from desugar.dynamo.entry import Entry
from tests.desugar.idioms.running import switched
from tests.desugar.judge import assert_same_values, by_pass


def entry_of(compiled):
    calls = compiled._calls if hasattr(compiled, "_calls") else type(compiled)._desugar_calls
    assert isinstance(calls, Entry)
    return calls


def direct(compiled, *args, **kwargs):
    """Calls, and returns the result and whether the call went straight to its program."""
    scope, slow = entry_of(compiled).function.__globals__, []
    original = scope["compile_or_call"]
    scope["compile_or_call"] = lambda *a, **k: slow.append(1) or original(*a, **k)
    try:
        return compiled(*args, **kwargs), not slow
    finally:
        scope["compile_or_call"] = original


def is_direct(compiled, *args, **kwargs):
    return direct(compiled, *args, **kwargs)[1]


# ---- parameters ----------------------------------------------------------------------------------------------


def many(a, b=2, /, c=3, *rest, d, e=5, **more):
    return a * b * c + sum(rest) * d - e + sum(more.values())


CALLS = [
    (many, (2,), {"d": 1}),
    (many, (2, 3, 4, 5, 6), {"d": 1, "e": 2, "z": 3}),
    (many, (2, 3), {"c": 7, "d": 1, "y": 1, "z": 3}),
    (lambda: torch.ones(2) * 2, (), {}),
    (lambda *xs: xs[0] + len(xs), (1, 2), {}),
    (lambda **kw: kw["x"] * 2 + len(kw), (), {"x": 1, "y": 2}),
    (
        lambda frame, fn, code, eval_frame, entry, self: frame * fn + code * eval_frame - entry + self,
        tuple(range(6)),
        {},
    ),
]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("fn", "args", "kwargs"), CALLS, ids=range(len(CALLS)))
def test_calls_of_every_kind(fn, args, kwargs):
    args = tuple(torch.full((2,), float(arg)) for arg in args)
    kwargs = {name: torch.full((2,), float(arg)) for name, arg in kwargs.items()}
    compiled = by_pass(fn)
    for _ in range(2):
        assert_same_values([compiled(*args, **kwargs)], [fn(*args, **kwargs)])
    assert is_direct(compiled, *args, **kwargs)
    assert inspect.signature(compiled) == inspect.signature(fn)


@pytest.mark.parametrize(
    ("fn", "right", "wrong"),
    [
        (lambda x, *, by: x * by, {"by": 2}, lambda f, x: f(x, 2)),
        (lambda x, by=2, /: x * by, {}, lambda f, x: f(x, by=2)),
    ],
)
def test_parameters_by_position_or_name_alone_stay_so(fn, right, wrong):
    compiled, x = by_pass(fn), torch.ones(2)
    for _ in range(2):
        compiled(x, **right)
        with pytest.raises(TypeError, match="positional"):
            wrong(compiled, x)


# ---- what is compiled ----------------------------------------------------------------------------------------


# ---- what goes another way -----------------------------------------------------------------------------------


def double(x):
    return x * 2


SET_CODE = functools.partial(setattr, double, "__code__")


AROUND = {
    "reset": lambda: switched(lambda _: torch.compiler.reset(), None, None),
    "stance": lambda: torch.compiler.set_stance("force_eager"),
    "code": lambda: switched(SET_CODE, (lambda x: x * 3).__code__, double.__code__),
    "mode": lambda: torch.utils.flop_counter.FlopCounterMode(display=False),
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "disable": lambda: torch._dynamo.config.patch(disable=True),
}


@pytest.mark.parametrize("way", AROUND)
def test_what_a_call_asks_besides_the_guards(way):
    compiled, x = by_pass(double), torch.ones(2)
    compiled(x)
    assert is_direct(compiled, x)
    with AROUND[way]():
        expected = double(x)
        assert way == "disable" or not is_direct(compiled, x)
        assert torch.equal(compiled(x), expected)
    assert torch.equal(compiled(x), double(x))


def test_forward_mode_tangents_are_kept():
    compiled, x = by_pass(double), torch.ones(2)
    compiled(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.full((2,), 3.0))
        assert torch.autograd.forward_ad.unpack_dual(compiled(dual)).tangent.tolist() == [6, 6]


# ---- the names of programs -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_globals_do_not_fill_up():
    before = {name for name in globals() if name.startswith("__desugar_")}
    compiled = by_pass(double)
    compiled(torch.ones(2))
    assert is_direct(compiled, torch.ones(2))
    gone = weakref.ref(compiled)
    del compiled
    torch.compiler.reset()
    gc.collect()
    assert gone() is None
    assert {name for name in globals() if name.startswith("__desugar_")} <= before
