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
from tests.desugar.idioms.running import idiom

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


@idiom
def closure_list_changed(compile_):
    scales = [2.0]
    fn, x = compile_(lambda x: [x * scale for scale in scales]), make(Pair, 2, 3)
    yield fn(x)
    scales.append(3.0)
    yield fn(x)
    scales[0] = 5.0
    yield fn(x)
    scales.clear()
    yield fn(x)


@idiom
def closure_dict_changed(compile_):
    options = {"scale": 2.0}
    fn = compile_(lambda x: x * options["scale"] + options.get("shift", 0.0) + len(options))
    x = make(TwoTensor, 2, 3)
    yield fn(x)
    options["scale"] = 3.0
    yield fn(x)
    options["shift"] = 1.0
    yield fn(x)
    del options["shift"]
    yield fn(x)


@idiom
def closure_tensor_rebound(compile_):
    weight = torch.ones(3)
    fn, x = compile_(lambda x: x * weight), make(Tagged, 2, 3)
    yield fn(x)
    weight.mul_(2)
    yield fn(x)
    weight = torch.full((3,), 5.0)
    yield fn(x)
    weight = 2
    yield fn(x)


@idiom
def nonlocal_counter(compile_):
    count = 0

    def fn(x):
        nonlocal count
        count += 1
        return x + count

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    for _ in range(4):
        yield fn(x), count


@idiom
def global_number_changed(compile_):
    global LEVEL
    fn, x = compile_(lambda x: x * LEVEL if LEVEL > 0 else x), make(Pair, 2, 3)
    for LEVEL in (1.0, 2.5, -1.0):  # noqa: B007 - the function reads it
        yield fn(x)


@idiom
def global_rebound_inside(compile_):
    global CALLS

    def fn(x):
        global CALLS
        CALLS += 1
        return x * CALLS

    CALLS, fn, x = 0, compile_(fn), make(TwoTensor, 2, 3)
    for _ in range(4):
        yield fn(x), CALLS
    CALLS = 10
    yield fn(x), CALLS


@idiom
def global_list_changed(compile_):
    LEVELS[:] = [1.0, 2.0]
    fn, x = compile_(lambda x: sum(x * level for level in LEVELS)), make(Pair, 2, 3)
    yield fn(x)
    LEVELS.append(3.0)
    yield fn(x)
    LEVELS[0] = 7.0
    yield fn(x)


@idiom
def global_dict_changed(compile_):
    OPTIONS.clear()
    OPTIONS["scale"] = 2.0
    fn, x = compile_(lambda x: {name: x * value for name, value in OPTIONS.items()}), make(Labeled, 2, 3)
    yield fn(x)
    OPTIONS["scale"] = 3.0
    yield fn(x)
    OPTIONS["other"] = 4.0
    yield fn(x)


@idiom
def global_list_grows_inside(compile_):
    def fn(x):
        SEEN.append(x * 2)
        return len(SEEN)

    SEEN.clear()
    fn = compile_(fn)
    for _ in range(3):
        yield fn(make(TwoTensor, 2, 3)), SEEN


@idiom
def global_tensor_rebound(compile_):
    global WEIGHT
    WEIGHT = torch.ones(3)
    fn, x = compile_(lambda x: x * WEIGHT), make(TwoTensor, 2, 3)
    yield fn(x)
    WEIGHT = torch.full((3,), 4.0)
    yield fn(x)
    WEIGHT += 1
    yield fn(x)


@idiom
def global_namespace_changed(compile_):
    CONFIG.scale, CONFIG.name = 1.0, "a"
    fn, x = compile_(lambda x: (x * CONFIG.scale, CONFIG.name.upper())), make(Pair, 2, 3)
    yield fn(x)
    CONFIG.scale = 2.0
    yield fn(x)
    CONFIG.name = "b"
    yield fn(x)


@idiom
def global_function_replaced(compile_):
    global activation
    first, fn, x = activation, compile_(lambda x: activation(x)), make(TwoTensor, 2, 3)
    yield fn(x)
    activation = torch.cos
    yield fn(x)
    activation = first
    yield fn(x)


@idiom
def environment_variable(compile_):
    def fn(x):
        y = x + 1
        return y * 2 if os.environ.get("DESUGAR_IDIOM") == "1" else y

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    yield fn(x)
    os.environ["DESUGAR_IDIOM"] = "1"
    yield fn(x)
    del os.environ["DESUGAR_IDIOM"]
    yield fn(x)


@idiom
def context_variable(compile_):
    fn, x = compile_(lambda x: x * DEPTH.get()), make(Pair, 2, 3)
    yield fn(x)
    token = DEPTH.set(5)
    yield fn(x)
    DEPTH.reset(token)
    yield fn(x)


@idiom
def function_attribute(compile_):
    def helper(x):
        return x * helper.scale

    helper.scale = 2.0
    fn, x = compile_(lambda x: helper(x)), make(TwoTensor, 2, 3)
    yield fn(x)
    helper.scale = 3.0
    yield fn(x)


@idiom
def mutable_default_argument(compile_):
    def fn(x, seen=[]):  # noqa: B006 - this is the idiom
        seen.append(len(seen))
        return x * len(seen), list(seen)

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    for _ in range(3):
        yield fn(x)


@idiom
def defaults_replaced(compile_):
    def helper(x, scale=2.0, *, shift=1.0):
        return x * scale + shift

    fn, x = compile_(lambda x: helper(x)), make(Pair, 2, 3)
    yield fn(x)
    helper.__defaults__ = (3.0,)
    yield fn(x)
    helper.__kwdefaults__ = {"shift": 5.0}
    yield fn(x)


# --------------------------------------------------------------------------------------------- random numbers


@idiom
def python_random(compile_):
    fn, x = compile_(lambda x: x * random.random() + random.randint(0, 9)), make(TwoTensor, 2, 3)
    for _ in range(3):
        yield fn(x)
    random.seed(5)
    yield fn(x), random.random()


@idiom
def numpy_random(compile_):
    def fn(x):
        return x * float(np.random.rand())

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    for _ in range(3):
        yield fn(x)
    yield float(np.random.rand())


@idiom
def manual_seed_inside(compile_):
    def fn(x):
        torch.manual_seed(7)
        return x * torch.rand(3)

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    for _ in range(3):
        yield fn(x), torch.rand(2)


@idiom
def random_numbers_in_order(compile_):
    fn, x = compile_(lambda x: (x * torch.rand(3), torch.randn_like(x))), make(Pair, 2, 3)
    for _ in range(3):
        yield fn(x), torch.rand(1)


@idiom
def torch_generator(compile_):
    generator = torch.Generator()
    fn = compile_(lambda x, generator: x * torch.rand(3, generator=generator))
    x = make(TwoTensor, 2, 3)
    for seed in (1, 2, 1):
        generator.manual_seed(seed)
        yield fn(x, generator), fn(x, generator)
