"""Idioms of calling: helpers, exceptions, context managers, printing, and variables around a function."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import io
import logging
import operator
import os
import random
import warnings
from types import SimpleNamespace

import numpy as np
import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.desugar.classes import Labeled, Pair, Tagged, make
from tests.desugar.idioms.running import (
    again,
    between,
    calling,
    idiom,
    idioms_of_calls,
    idioms_of_changes,
    raised,
    wrapper,
)

ACTIVE: list = []


class UserError(Exception):
    """Neither a built-in error nor one of PyTorch."""


class Scaled:
    """A context manager with state of its own."""

    active = 1.0

    def __init__(self, factor):
        self.factor, self.entered = factor, 0

    def __enter__(self):
        self.entered += 1
        self.before, Scaled.active = Scaled.active, self.factor
        return self

    def __exit__(self, *error):
        Scaled.active = self.before


# ---------------------------------------------------------------------------------------------------- helpers


def power(x, n):
    return x if n == 0 else x * power(x, n - 1)


def total(tree):
    return sum(total(branch) for branch in tree) if isinstance(tree, list) else tree


@functools.lru_cache
def table(n):
    return [step / n for step in range(n)]


@functools.singledispatch
def dispatched(x):
    return x


dispatched.register(TwoTensor, lambda x: x * 2)
dispatched.register(int, lambda x: x + 1)

idioms_of_calls(
    {
        "single_dispatch": (
            lambda x: dispatched(x),
            lambda fn, x: (fn(value) for value in (x, 3, make(Pair, 2, 3), 4, "text")),
        ),
        "recursion": (
            lambda x, n, tree: (power(x, n), total(tree)),
            lambda fn, x: (fn(x, n, tree) for n, tree in ((1, [x]), (3, [x, [x, x]]), (0, [[x], [x, [x]]]))),
        ),
        "cached_helper": (
            lambda x: x * torch.tensor(table(x.shape[-1])),
            lambda fn, x: (fn(make(TwoTensor, 2, width)) for width in (3, 4, 3, 5)),
        ),
    }
)


def counted(calls, helper):
    @functools.wraps(helper)
    def wrapper(*args, **kwargs):
        calls.append(helper.__name__)
        return helper(*args, **kwargs)

    return wrapper


idioms_of_changes(
    {
        "decorated_helper": (
            list,
            lambda calls: (lambda helper: lambda x: helper(x) + helper(x, scale=3))(
                counted(calls, lambda x, scale=1: x * scale)
            ),
            *(lambda fn, calls: (fn(make(Pair, 2, 3)), calls), again, again),
        ),
        "lambdas_in_a_list": (
            lambda: [lambda x: x * 2, torch.sin],
            lambda steps: lambda x: functools.reduce(lambda y, step: step(y), steps, x),
            *(lambda fn, steps: fn(make(Pair, 2, 3)), lambda steps: steps.append(torch.neg)),
            lambda steps: steps.__setitem__(0, operator.attrgetter("T")),
        ),
        "registry_of_functions": (
            lambda: {"a": lambda x: x * 2},
            lambda registry: lambda x, name: registry[name](x) if name in registry else None,
            lambda fn, registry: (fn(wrapper(), "a"), fn(wrapper(), "b")),
            *(lambda registry: registry.update(b=torch.cos), lambda registry: registry.update(a=torch.exp)),
        ),
    }
)


@idiom
def compiled_calls_compiled(compile_):
    inner = compile_(lambda x, scale: x * scale)
    outer, x = compile_(lambda x, scale: inner(x, scale) + inner(x + 1, 2.0)), make(Pair, 2, 3)
    return ((outer(x, scale), inner(x, scale)) for scale in (1.0, 2.0))


# ------------------------------------------------------------------------------- exceptions, contexts, output


def raising_for_some(x, n):
    if n < 0:
        raise ValueError(f"n is {n}")
    return x * n


def failing_half_way(x, state):
    state["steps"] = state.get("steps", 0) + 1
    state["x"].mul_(2)
    if state["steps"] == 2:
        raise UserError
    state["steps"] += 10
    return x * state["steps"]


def catching(x, options):
    notes = []
    try:
        scale = options["scale"]
        if scale > 5:
            raise UserError("too large")
    except KeyError as error:
        scale = 1
        notes.append(error.args[0])
    except UserError as error:
        scale = 5
        notes.append(str(error))
    else:
        notes.append("fine")
    finally:
        notes.append("done")
    return x * scale, notes


def catching_an_operators(x, w):
    try:
        return x + w
    except RuntimeError:
        return x


def asserting(x, n):
    assert n > 0, f"got {n}"
    assert x.shape[0] == 2
    return x * n


def entering(x, factor):
    with Scaled(factor) as entered:
        y = x * Scaled.active
    return y, entered.entered, Scaled.active


def entering_an_argument(x, scope):
    y = x + 1
    with scope as entered:
        y = y * Scaled.active
    return y, entered.entered, Scaled.active


def on_a_stack(x, grad):
    x = x + 1
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.nullcontext())
        if not grad:
            stack.enter_context(torch.no_grad())
        return x * 2


@contextlib.contextmanager
def active(name):
    ACTIVE.append(name)
    try:
        yield len(ACTIVE)
    finally:
        ACTIVE.pop()


def in_two_contexts(x):
    with active("a") as one, active("b") as two:
        return x * one + two * len(ACTIVE)


def printing(x, n):
    y = x * n
    print("n is", n, tuple(y.shape), sep="|")
    return y + 1


def warning(x, n):
    if n > 1:
        warnings.warn(f"n is {n}", stacklevel=1)
    return x * n


def noted(fn, x, n):
    """The result of a call, the text that it prints, and its warnings."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as text,
        warnings.catch_warnings(record=True, action="always") as caught,
    ):
        out = fn(x, n)
    return out, text.getvalue(), [str(w.message) for w in caught if "n is" in str(w.message)]


def error_of(fn, *args):
    """The result of a call, or the text of its error."""
    try:
        return fn(*args)
    except (AssertionError, UserError) as error:
        return str(error)


idioms_of_calls(
    {
        "exception_for_some_inputs": (
            raising_for_some,
            lambda fn, x: (raised(fn, x, n) for n in (1, -1, 2, -2)),
        ),
        "exception_half_way": (
            failing_half_way,
            lambda fn, x: (
                (error_of(fn, x, state), state) for state in [{"x": make(TwoTensor, 2, 3)}] for _ in range(3)
            ),
        ),
        "exception_caught_inside": (
            catching,
            lambda fn, x: (fn(x, options) for options in ({}, {"scale": 2}, {"scale": 9}, {"scale": 3})),
            Pair,
        ),
        "exception_of_an_operator": (
            catching_an_operators,
            lambda fn, x: tuple(fn(x, torch.ones(size)) for size in ((3,), (4,), (2, 1))),
        ),
        "assertions": (asserting, lambda fn, x: (error_of(fn, x, n) for n in (1, 0, 2)), Pair),
        "users_context_manager": (
            entering,
            lambda fn, x: ((fn(x, factor), Scaled.active) for factor in (2.0, 3.0, 5.0)),
        ),
        "exit_stack": (
            on_a_stack,
            lambda fn, x: tuple(fn(x.requires_grad_(), grad) for grad in (True, False, True)),
        ),
        "context_manager_as_an_argument": (
            entering_an_argument,
            lambda fn, x: (
                (fn(x, scope), scope.entered) for scope in [Scaled(2.0)] for scope.factor in (2.0, 2.0, 5.0)
            ),
        ),
        "printing": (printing, lambda fn, x: (noted(fn, x, n) for n in (1, 2, 3, 3))),
        "warning_inside": (warning, lambda fn, x: (noted(fn, x, n) for n in (1, 2, 2))),
    }
)


idioms_of_changes(
    {
        "generator_context_manager": (
            ACTIVE.clear,
            *(lambda _: in_two_contexts, lambda fn, _: (fn(wrapper()), ACTIVE)),
            lambda _: ACTIVE.append("outside"),
        ),
    }
)


@idiom
def logging_inside(compile_):
    logger, text = logging.Logger("idioms"), io.StringIO()
    logger.addHandler(logging.StreamHandler(text))
    fn, x = compile_(lambda x, n: (logger.warning("n is %s", n), x * n)[1]), make(Pair, 2, 3)
    return ((fn(x, n), text.getvalue()) for n in (1, 2, 2))


# ---- variables around a function -----------------------------------------------------------------------------

LEVEL = 1.0
CALLS = 0
LEVELS = [1.0, 2.0]
OPTIONS: dict = {"scale": 2.0}
SEEN: list = []
WEIGHT = torch.ones(3)
CONFIG = SimpleNamespace(scale=1.0, name="a")
DEPTH = contextvars.ContextVar("DEPTH", default=1)


def activation(x):
    return x.sin()


# --------------------------------------------------------------------------------------------------- closures


@idiom
def closure_number_changed(compile_):
    scale = 2.0
    fn, x = compile_(lambda x: x * scale), make(TwoTensor, 2, 3)
    for scale in (2.0, 3.0, -1.0, 2.0):  # noqa: B007 - the function reads it
        yield fn(x)


idioms_of_changes(
    {
        "closure_list_changed": (
            lambda: [2.0],
            *(lambda scales: lambda x: [x * scale for scale in scales], calling),
            *(lambda scales: scales.append(3.0), lambda scales: scales.__setitem__(0, 5.0), list.clear),
        ),
        "closure_dict_changed": (
            lambda: {"scale": 2.0},
            lambda options: lambda x: x * options["scale"] + options.get("shift", 0.0) + len(options),
            *(calling, lambda options: options.update(scale=3.0)),
            *(lambda options: options.update(shift=1.0), lambda options: options.pop("shift")),
        ),
        "global_list_grows_inside": (
            SEEN.clear,
            lambda _: lambda x: (SEEN.append(x * 2), len(SEEN))[1],
            *(lambda fn, _: (fn(wrapper()), SEEN), again, again),
        ),
        "mutable_default_argument": (
            lambda: None,
            lambda _: lambda x, seen=[]: (seen.append(len(seen)), (x * len(seen), list(seen)))[1],
            *(calling, again, again),
        ),
    }
)


@idiom
def closure_tensor_rebound(compile_):
    weight = torch.ones(3)
    fn, x = compile_(lambda x: x * weight), make(Tagged, 2, 3)
    yield from between(lambda: fn(x), lambda: weight.mul_(2))
    for weight in (torch.full((3,), 5.0), 2):  # noqa: B007 - the function reads it
        yield fn(x)


@idiom
def nonlocal_counter(compile_):
    count = 0

    def fn(x):
        nonlocal count
        count += 1
        return x + count

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    return ((fn(x), count) for _ in range(4))


# ---------------------------------------------------------------------------------------------------- globals

HERE = globals()


def shifted(x, scale=2.0, *, shift=1.0):
    return x * scale + shift


def scaled(x):
    return x * scaled.scale


scaled.scale = 2.0
TOKENS: list = []

# By name the function, the class of its argument, and changes of which the last ones undo the first.
CHANGED = {
    "global_number_changed": (
        lambda x: x * LEVEL if LEVEL > 0 else x,
        Pair,
        *(lambda: HERE.update(LEVEL=2.5), lambda: HERE.update(LEVEL=-1.0), lambda: HERE.update(LEVEL=1.0)),
    ),
    "global_list_changed": (
        lambda x: sum(x * level for level in LEVELS),
        Pair,
        lambda: LEVELS.append(3.0),
        lambda: LEVELS.__setitem__(0, 7.0),
        lambda: LEVELS.__setitem__(slice(None), [1.0, 2.0]),
    ),
    "global_dict_changed": (
        lambda x: {name: x * value for name, value in OPTIONS.items()},
        Labeled,
        lambda: OPTIONS.update(scale=3.0),
        lambda: OPTIONS.update(other=4.0),
        lambda: (OPTIONS.pop("other"), OPTIONS.update(scale=2.0)),
    ),
    "global_tensor_rebound": (
        lambda x: x * WEIGHT,
        TwoTensor,
        lambda: HERE.update(WEIGHT=torch.full((3,), 4.0)),
        lambda: WEIGHT.add_(1),
        lambda: HERE.update(WEIGHT=torch.ones(3)),
    ),
    "global_namespace_changed": (
        lambda x: (x * CONFIG.scale, CONFIG.name.upper()),
        Pair,
        lambda: setattr(CONFIG, "scale", 2.0),
        lambda: setattr(CONFIG, "name", "b"),
        lambda: vars(CONFIG).update(scale=1.0, name="a"),
    ),
    "global_function_replaced": (
        lambda x: activation(x),
        TwoTensor,
        lambda: HERE.update(activation=torch.cos),
        lambda first=activation: HERE.update(activation=first),
    ),
    "environment_variable": (
        lambda x: (x + 1) * 2 if os.environ.get("DESUGAR_IDIOM") == "1" else x + 1,
        TwoTensor,
        lambda: os.environ.update(DESUGAR_IDIOM="1"),
        lambda: os.environ.pop("DESUGAR_IDIOM"),
    ),
    "context_variable": (
        lambda x: x * DEPTH.get(),
        Pair,
        lambda: TOKENS.append(DEPTH.set(5)),
        lambda: DEPTH.reset(TOKENS.pop()),
    ),
    "function_attribute": (
        lambda x: scaled(x),
        TwoTensor,
        lambda: setattr(scaled, "scale", 3.0),
        lambda: setattr(scaled, "scale", 2.0),
    ),
    "defaults_replaced": (
        lambda x: shifted(x),
        Pair,
        lambda: setattr(shifted, "__defaults__", (3.0,)),
        lambda: setattr(shifted, "__kwdefaults__", {"shift": 5.0}),
        lambda: setattr(shifted, "__kwdefaults__", {"shift": 1.0}),
        lambda: setattr(shifted, "__defaults__", (2.0,)),
    ),
}
idioms_of_calls(
    {
        name: (fn, lambda fn, x, changes=changes: between(lambda: fn(x), *changes), cls)
        for name, (fn, cls, *changes) in CHANGED.items()
    }
)


@idiom
def global_rebound_inside(compile_):
    global CALLS

    def fn(x):
        global CALLS
        CALLS += 1
        return x * CALLS

    CALLS, fn, x = 0, compile_(fn), make(TwoTensor, 2, 3)
    nothing = [lambda: None] * 3
    return between(lambda: (fn(x), CALLS), *nothing, lambda: HERE.update(CALLS=10))


# --------------------------------------------------------------------------------------------- random numbers


idioms_of_calls(
    {
        "python_random": (
            lambda x: x * random.random() + random.randint(0, 9),
            lambda fn, x: (fn(x), fn(x), fn(x), random.seed(5), fn(x), random.random()),
        ),
        "numpy_random": (
            lambda x: x * float(np.random.rand()),
            lambda fn, x: (fn(x), fn(x), fn(x), float(np.random.rand())),
        ),
        "manual_seed_inside": (
            lambda x: (torch.manual_seed(7), x * torch.rand(3))[1],
            lambda fn, x: ((fn(x), torch.rand(2)) for _ in range(3)),
        ),
        "random_numbers_in_order": (
            lambda x: (x * torch.rand(3), torch.randn_like(x)),
            lambda fn, x: ((fn(x), torch.rand(1)) for _ in range(3)),
            Pair,
        ),
        "torch_generator": (
            lambda x, generator: x * torch.rand(3, generator=generator),
            lambda fn, x: (
                (fn(x, generator), fn(x, generator))
                for seed in (1, 2, 1)
                for generator in [torch.Generator().manual_seed(seed)]
            ),
        ),
    }
)
