"""The generated entry: parameters, guards, calls that leave the fast path, and names in a profiler's traces."""

import contextlib
import functools
import gc
import inspect
import weakref

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from desugar.dynamo.entry import EntryCallable
from tests.desugar.judge import assert_same_values, by_pass, switched
from tests.doors import by_desugar, by_torch


def entry_of(compiled):
    calls = compiled._calls if hasattr(compiled, "_calls") else type(compiled)._desugar_calls
    assert isinstance(calls, EntryCallable)
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


class Scaled(torch.nn.Module):
    def forward(self, x, y):
        return x * y


MISSING = r"\(\) missing 1 required positional argument: 'y'"
# A function, a right call, a wrong one, and words of its error.
WRONG = [
    (lambda x, y: x * y, lambda f, x: f(x, 2), lambda f, x: f(x), rf"<lambda>{MISSING}"),
    (Scaled(), lambda f, x: f(x, 2), lambda f, x: f(x), rf"Scaled.forward{MISSING}"),
    (lambda x, y: x * y, lambda f, x: f(x, 2), lambda f, x: f(x, wrong=1), "unexpected keyword"),
    (lambda x, *, by: x * by, lambda f, x: f(x, by=2), lambda f, x: f(x, 2), "positional"),
    (lambda x, by=2, /: x * by, lambda f, x: f(x), lambda f, x: f(x, by=2), "positional"),
]


@pytest.mark.parametrize(("fn", "right", "wrong", "words"), WRONG)
def test_wrong_calls_before_and_after_it_is_compiled(fn, right, wrong, words):
    compiled, x = by_pass(fn), torch.ones(2)
    for _ in range(2):
        with pytest.raises(TypeError, match=words):
            wrong(compiled, x)
        right(compiled, x)


# ---- calls that leave the fast path --------------------------------------------------------------------------


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


# ---- names in the traces of torch.profiler, and nothing of it otherwise ---------------------------------------------


def names_of(run):
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        run()
    return [event.name for event in prof.events() if event.name.startswith("desugar")]


DOORS = pytest.mark.parametrize("door", [by_desugar, by_torch])


@DOORS
def test_calls_and_graphs_have_names(door):
    compiled, x = door(double), torch.ones(3)
    compiled(x)
    assert (
        names_of(lambda: [compiled(x), compiled(x)])
        == ["desugar: double", "desugar graph: double, forward"] * 2
    )


@DOORS
def test_backwards_have_names_once_they_have_run(door):
    compiled, x = door(double), torch.ones(3, requires_grad=True)
    compiled(x).sum().backward()
    assert "desugar graph: double, backward" in names_of(lambda: compiled(x).sum().backward())
    torch.testing.assert_close(x.grad, torch.full((3,), 4.0))


@DOORS
def test_a_call_that_compiles_or_fails_under_a_profiler(door):
    compiled, failing = door(double), door(lambda x: x @ torch.ones(7))
    assert names_of(lambda: compiled(torch.ones(2)))[0] == "desugar: double"

    def run():
        with contextlib.suppress(RuntimeError):
            failing(torch.ones(2))
        compiled(torch.ones(2))

    assert names_of(run).count("desugar: double") == 1


class Twice(torch.nn.Module):
    def forward(self, x):
        return x * 2


def breaks(x):
    y = x * 2
    torch._dynamo.graph_break()
    return y + 1


def test_modules_and_functions_that_break():
    module, broken, x = by_desugar(Twice()), by_desugar(breaks), torch.ones(3)
    module(x), broken(x)
    assert names_of(lambda: module(x)) == ["desugar: Twice", "desugar graph: Twice, forward"]
    assert names_of(lambda: broken(x)) == ["desugar: breaks", *["desugar graph: breaks, forward"] * 2]


def test_without_a_profiler_graphs_keep_no_names():
    compiled = by_desugar(double)
    compiled(torch.ones(3))
    assert compiled.programs[0].run.__globals__["compiled_graph"].__qualname__.startswith("run_eagerly")
