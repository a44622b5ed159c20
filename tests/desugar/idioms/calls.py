"""Idioms of calling: helpers, exceptions, context managers, variables around a function, arguments and results."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import functools
import io
import itertools
import math
import operator
import os
import random
import warnings
from collections import deque
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
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
    trained,
    wrapper,
)


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


@functools.lru_cache
def table(n):
    return [step / n for step in range(n)]


idioms_of_calls(
    {
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


def entering(x, factor):
    with Scaled(factor) as entered:
        y = x * Scaled.active
    return y, entered.entered, Scaled.active


def entering_an_argument(x, scope):
    y = x + 1
    with scope as entered:
        y = y * Scaled.active
    return y, entered.entered, Scaled.active


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
        "users_context_manager": (
            entering,
            lambda fn, x: ((fn(x, factor), Scaled.active) for factor in (2.0, 3.0, 5.0)),
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


# ---- arguments, results and containers of every kind ----------------------------------------------------------------


class Mode(enum.Enum):
    SINE = "sine"
    COSINE = "cosine"


class Flags(enum.IntFlag):
    DOUBLE = 1
    SHIFT = 2


class Point(NamedTuple):
    x: Tensor
    y: Tensor


class Options(dict):
    """A dict whose items are attributes."""

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]


class Stack(list):
    """A list with a method."""

    def top(self):
        return self[-1]


NO_FLAGS = Flags(0)
INDICES = (slice(1), slice(1, 3), slice(None, None, 2), ..., 0, -1, (..., 1), None, (slice(2), None, 0))


class Stats(NamedTuple):
    value: Tensor
    count: int


@dataclasses.dataclass(frozen=True)
class Output:
    value: Tensor
    label: str | None = None


# -------------------------------------------------------------------------------------------------- arguments


def nested_containers(tree):
    tree = {**tree, "n": len(tree)}
    return [tree, (tree["x"][0] * 2, {"y": tree["x"][-1]}), None]


def branches_on_sizes(x):
    rows, cols = x.shape
    y = x * 2 if rows > cols else x + rows
    return y if rows % 2 else (y, f"{rows}x{cols}")


idioms_of_calls(
    {
        "int_argument_changed_often": (
            lambda x, n: (x * n + n % 3, n + 1),
            lambda fn, x: (fn(x, n) for n in range(20)),
        ),
        "float_argument_changed_often": (
            lambda x, rate: (x * rate, rate / 2),
            lambda fn, x: (fn(x, 1.0 / (step + 1)) for step in range(20)),
        ),
        "float_argument_without_an_inverse": (
            lambda x, rate: (x * rate, rate / 2),
            lambda fn, x: (fn(x, rate)[0] for rate in (1.0, 0.5, 0.0, -0.0, math.inf, math.nan)),
        ),
        "int_and_float_and_bool_arguments": (
            lambda x, n: x * n if n else x,
            lambda fn, x: (fn(x, n) for n in (1, 1.0, True, 0, 0.0, False, None, 2)),
            Pair,
        ),
        "integer_decides_a_branch": (
            lambda x, n: x * n if n > 5 else x[:, :n] if n % 2 else x + n,
            lambda fn, x: (fn(x, n) for n in (1, 2, 7, 4, 5, 3, 9, 8)),
            *(TwoTensor, 2, 9),
        ),
        "string_argument": (
            lambda x, mode, *, other="none": (
                {"sin": torch.sin, "cos": torch.cos}.get(mode, torch.neg)(x),
                f"{mode}-{other}".upper(),
            ),
            lambda fn, x: ((fn(x, mode), fn(x, mode, other=mode)) for mode in ("sin", "cos", "tan")),
            Pair,
        ),
        "enum_argument": (
            lambda x, mode, flags=NO_FLAGS: (
                (x.sin() if mode is Mode.SINE else x.cos()) * (2 if flags & Flags.DOUBLE else 1),
                mode.value,
                flags | Flags.SHIFT,
            ),
            lambda fn, x: ((fn(x, mode), fn(x, mode, Flags.DOUBLE)) for mode in Mode),
        ),
        "dtype_and_device_arguments": (
            lambda x, dtype, device: (
                x.to(dtype),
                torch.zeros(3, dtype=dtype, device=device),
                x.dtype == dtype,
                str(device),
            ),
            lambda fn, x: (
                (fn(x, dtype, torch.device("cpu")), fn(make(Pair, 2, 3), dtype, "cpu"))
                for dtype in (torch.float32, torch.float64, torch.bfloat16)
            ),
        ),
        "slices_and_indices": (
            lambda x, index: x[index],
            lambda fn, x: (fn(x, index) for index in (*INDICES, torch.tensor([0, 2]), [0, 1])),
            *(TwoTensor, 4, 3),
        ),
        "optional_tensor": (
            lambda x, mask=None: x + 1 if mask is None else (x + 1) * mask,
            lambda fn, x: (fn(x), fn(x, torch.zeros(3)), fn(x, None), fn(x, mask=make(Pair, 2, 3))),
            Pair,
        ),
        "varying_number_of_arguments": (
            lambda x, *others, scale=1, **named: (
                (x + sum(others)) * scale,
                [(name, value * 2) for name, value in named.items()],
            ),
            lambda fn, x: (
                (fn(x), fn(x, x), fn(x, x, 3, scale=2)),
                (fn(x, a=x), fn(x, b=x, a=1), fn(x, a=1, b=x)),
                fn(*[x] * 5, scale=3, c=x),
            ),
        ),
        "positional_and_keyword": (
            lambda x, /, y, *, z=2: x * y + z,
            lambda fn, x: (fn(x, x), fn(x, y=x), fn(x, z=x, y=3), raised(fn, x), fn(x, 1)),
            Pair,
        ),
        "nested_containers_in_and_out": (
            nested_containers,
            lambda fn, x: (fn({"x": (x, make(TwoTensor, 2, 3))[:n], "name": "a"}) for n in (1, 2)),
        ),
        "sizes_of_zero_and_one": (
            lambda x: (x * 2, x.sum(0), x.shape[0], torch.cat([x, x])),
            lambda fn, x: (trained(fn, make(TwoTensor, n, 3, grad=True)) for n in (3, 1, 0, 4, 1, 0, 5)),
        ),
        "number_of_dimensions": (
            lambda x: (x.reshape(-1) if x.dim() > 2 else x * x.dim(), x.numel(), list(x.shape)),
            lambda fn, x: (fn(make(Pair, *size)) for size in ((3,), (2, 3), (2, 2, 3), (5, 3))),
        ),
        "branches_on_sizes": (
            branches_on_sizes,
            lambda fn, x: (fn(make(TwoTensor, rows, 4)) for rows in (2, 3, 4, 5, 6, 3)),
        ),
        "one_tensor_twice": (
            lambda a, b: (a is b, a * b),
            lambda fn, x: [(fn(x, y), fn(x, x), fn(y, x)) for y in [make(TwoTensor, 2, 3)]],
        ),
        "strides_change": (
            lambda x: (x * 2, x.stride(), x.is_contiguous()),
            lambda fn, x: (fn(x), fn(x.t()), fn(make(TwoTensor, 8, 4)[::2])),
            *(TwoTensor, 4, 4),
        ),
    }
)


# ---------------------------------------------------------------------------------------------------- results


def results_of_every_type(x, kind):
    y = x * 2
    return {
        "namedtuple": Stats(y, len(x)),
        "dataclass": Output(y, kind),
        "size": (x.size(), x.dtype, x.device),
        "nested": {"a": [y, (kind, 1)], "b": {1: 2.5}},
        "slice": (slice(0, len(x)), ..., Mode.SINE, range(len(x)), 1j),
        "none": None,
    }[kind]


idioms_of_calls(
    {
        "results_of_every_type": (
            results_of_every_type,
            lambda fn, x: (
                fn(x, kind)
                for kind in ("namedtuple", "dataclass", "size", "nested", "slice", "none", "namedtuple")
            ),
        ),
        "a_closure_returned": (
            lambda x, scale: (lambda y: lambda z: z + y)(x * scale),
            lambda fn, x: (fn(x, scale)(x) for scale in (1, 2, 3)),
        ),
        "formatted_text": (
            lambda x, name: (
                x + 1,
                f"{name}: {tuple(x.shape)} {x.dtype} {len(x):>3}",
                "{:03d}".format(*x.shape),
            ),
            lambda fn, x: (fn(make(Pair, rows, 3), f"n{rows}") for rows in (2, 3, 4)),
        ),
        "formatted_float": (
            lambda x, rate, notes: (notes.append(f"{rate:.1f}"), x * rate)[1],
            lambda fn, x: ((fn(x, rate, notes), notes) for notes in [[]] for rate in (1.0, 2.0, 3.0)),
            Pair,
        ),
        "the_argument_itself": (
            lambda x, xs: (x, xs, x * 2, xs[0]),
            lambda fn, x: (
                (out, out[0] is x, out[1] is xs, x, xs)
                for xs in ([x, x], [make(Pair, 2, 3)])
                for out in [fn(x, xs)]
            ),
            Pair,
        ),
        "one_result_twice": (
            lambda x: (lambda y: (y, [y, y.view(6)], {"y": y}))(x * 2),
            lambda fn, x: (
                seen
                for _ in range(2)
                for out in [fn(make(TwoTensor, 2, 3))]
                for seen in between(lambda out=out: out, lambda out=out: out[0].add_(1))
            ),
        ),
    }
)


# ------------------------------------------------------------------------------------------ how it is called


def containers_of_other_classes(point, options, stack):
    if "scale" in options:
        stack.append(point.x * options.scale)
    return Point(stack.top(), point.y), type(stack).__name__, options.get("shift")


def of_every_type(value):
    if isinstance(value, (list, tuple)):
        return [doubled(entry) for entry in value]
    return {"value": doubled(value)}


def doubled(value):
    return value * 2 if isinstance(value, (Tensor, int, float, str)) else value


idioms_of_calls(
    {
        "wrong_arguments": (
            lambda x, y=1, *, z=2: x * y + z,
            lambda fn, x: (
                (fn(x), raised(fn), raised(fn, x, 1, 2)),
                (raised(fn, x, w=1), raised(fn, x, x=1), fn(x, z=1)),
            ),
        ),
        "containers_of_other_classes": (
            containers_of_other_classes,
            lambda fn, x: (
                (fn(Point(x, y), options, stack), stack)
                for stack in [Stack()]
                for y, options in (
                    (x, Options(scale=2.0)),
                    (1, Options(shift=2.0)),
                    (1, Options(scale=3.0)),
                )
            ),
        ),
        "argument_of_every_type": (
            of_every_type,
            lambda fn, x: (
                fn(value)
                for value in (
                    *(x, 1, 2.5, "a", None, [x, 1], (x,), []),
                    *(b"a", 1j, torch.float32, {1}, range(2)),
                )
            ),
        ),
    }
)


# ---- containers that a function reads, fills and empties -----------------------------------------------------


def grow(x, out):
    out.append(x * 2)
    out += [len(out), "text"]
    return out[0] + 1


def change_a_dict(state):
    state["h"] = state["h"] * 2
    state.setdefault("steps", 0)
    state["steps"] += 1
    return state.pop("once", None)


def of_one_container(build, times):
    """Calls with a new tensor and one container, which is recorded as well."""
    return lambda fn, x: ((fn(make(TwoTensor, 2, 3), held), held) for held in [build()] for _ in range(times))


idioms_of_calls(
    {
        "list_argument_grows": (grow, of_one_container(list, 3)),
        "dict_argument_changed": (
            change_a_dict,
            lambda fn, x: (
                (fn(state), state) for state in [{"h": x, "once": torch.ones(2)}] for _ in range(3)
            ),
            Pair,
        ),
        "deque_of_bounded_length": (
            lambda x, window: (window.append(x), sum(window) / len(window))[1],
            of_one_container(lambda: deque(maxlen=2), 4),
        ),
        "next_of_an_iterator": (
            lambda x, it: x * next(it),
            lambda fn, x: (fn(x, it) for it in [iter([2, 3, 4])] for _ in range(3)),
        ),
        "next_of_a_count": (
            lambda x, it: x * next(it),
            lambda fn, x: (fn(x, it) for it in [itertools.count(1)] for _ in range(3)),
        ),
        "next_of_a_generator": (
            lambda x, it: x * next(it),
            lambda fn, x: [
                (fn(x, it), fn(x, it), fn(x, it), list(it)) for it in [(n * n for n in range(1, 9))]
            ],
        ),
        "generator_returned": (
            lambda x, n: (x * step for step in range(n)),
            lambda fn, x: (list(fn(x, n)) for n in (1, 3)),
        ),
    }
)


# ---- containers around a function ----------------------------------------------------------------------------


idioms_of_changes(
    {
        "tensor_default_argument": (
            lambda: torch.ones(3),
            lambda weight: lambda x, weight=weight, *, shift=torch.zeros(3): x * weight + shift,  # noqa: B008
            lambda fn, weight: (
                fn(wrapper()),
                fn(wrapper(), torch.full((3,), 2.0)),
                fn(wrapper(), shift=torch.ones(3)),
            ),
            lambda weight: weight.mul_(3),
        ),
        "set_changed": (
            set,
            lambda seen: lambda x, name: (x + 1 if name in seen else x * 2, seen.add(name))[0],
            lambda fn, seen: ((fn(wrapper(), name), seen) for name in ("a", "a", "b", "b", "a")),
        ),
    }
)
