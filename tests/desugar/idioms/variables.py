"""Idioms of variables around a function: closures, globals, defaults, the environment, random numbers."""

from __future__ import annotations

import contextvars
import os
import random
from types import SimpleNamespace

import numpy as np
import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.desugar.classes import Labeled, Pair, Tagged, make
from tests.desugar.idioms.running import between, calling, idiom, idioms_of_calls, idioms_of_changes

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


@idiom
def global_list_grows_inside(compile_):
    def fn(x):
        SEEN.append(x * 2)
        return len(SEEN)

    SEEN.clear()
    fn = compile_(fn)
    return ((fn(make(TwoTensor, 2, 3)), SEEN) for _ in range(3))


@idiom
def mutable_default_argument(compile_):
    def fn(x, seen=[]):  # noqa: B006 - this is the idiom
        seen.append(len(seen))
        return x * len(seen), list(seen)

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    return (fn(x) for _ in range(3))


# --------------------------------------------------------------------------------------------- random numbers


def seeding(x):
    torch.manual_seed(7)
    return x * torch.rand(3)


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
        "manual_seed_inside": (seeding, lambda fn, x: ((fn(x), torch.rand(2)) for _ in range(3))),
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
