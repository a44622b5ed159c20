"""Idioms of calling: helpers, exceptions, context managers, printing."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import operator
import warnings

import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.desugar.classes import Pair, make
from tests.desugar.idioms.running import idiom, raised

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


@idiom
def partial_with_a_changed_keyword(compile_):
    part = functools.partial(lambda x, scale, shift=0: x * scale + shift, scale=2.0)
    fn, x = compile_(lambda x: part(x)), make(TwoTensor, 2, 3)
    yield fn(x)
    part.keywords["scale"] = 3.0
    yield fn(x)
    part = functools.partial(part, shift=1)
    yield fn(x), compile_(part)(x)


@idiom
def lambdas_in_a_list(compile_):
    steps = [lambda x: x * 2, torch.sin]

    def fn(x):
        return functools.reduce(lambda y, step: step(y), steps, x)

    fn, x = compile_(fn), make(Pair, 2, 3)
    yield fn(x)
    steps.append(torch.neg)
    yield fn(x)
    steps[0] = operator.attrgetter("T")
    yield fn(x)


@idiom
def registry_of_functions(compile_):
    registry = {}

    def register(name):
        return lambda fn: registry.setdefault(name, fn)

    register("a")(lambda x: x * 2)
    fn, x = compile_(lambda x, name: registry[name](x) if name in registry else None), make(TwoTensor, 2, 3)
    yield fn(x, "a"), fn(x, "b")
    register("b")(torch.cos)
    yield fn(x, "a"), fn(x, "b")
    registry["a"] = torch.exp
    yield fn(x, "a")


@idiom
def decorated_helper(compile_):
    calls = []

    def counted(helper):
        @functools.wraps(helper)
        def wrapper(*args, **kwargs):
            calls.append(helper.__name__)
            return helper(*args, **kwargs)

        return wrapper

    @counted
    def helper(x, scale=1):
        return x * scale

    fn, x = compile_(lambda x: helper(x) + helper(x, scale=3)), make(Pair, 2, 3)
    for _ in range(3):
        yield fn(x), calls


@idiom
def single_dispatch(compile_):
    @functools.singledispatch
    def helper(x):
        return x

    helper.register(TwoTensor, lambda x: x * 2)
    helper.register(int, lambda x: x + 1)
    fn = compile_(lambda x: helper(x))
    for value in (make(TwoTensor, 2, 3), 3, make(Pair, 2, 3), 4, "text"):
        yield fn(value)


@idiom
def recursion(compile_):
    def power(x, n):
        return x if n == 0 else x * power(x, n - 1)

    def total(tree):
        return sum(total(branch) for branch in tree) if isinstance(tree, list) else tree

    fn, x = compile_(lambda x, n, tree: (power(x, n), total(tree))), make(TwoTensor, 2, 3)
    for n, tree in ((1, [x]), (3, [x, [x, x]]), (0, [[x], [x, [x]]])):
        yield fn(x, n, tree)


@idiom
def cached_helper(compile_):
    @functools.lru_cache
    def table(n):
        return [step / n for step in range(n)]

    fn = compile_(lambda x: x * torch.tensor(table(x.shape[-1])))
    for width in (3, 4, 3, 5):
        yield fn(make(TwoTensor, 2, width))


@idiom
def compiled_calls_compiled(compile_):
    inner = compile_(lambda x, scale: x * scale)
    outer, x = compile_(lambda x, scale: inner(x, scale) + inner(x + 1, 2.0)), make(Pair, 2, 3)
    for scale in (1.0, 2.0):
        yield outer(x, scale), inner(x, scale)


@idiom
def decorated_method(compile_):
    class Model:
        scale = 2.0

        @compile_
        def apply(self, x, shift=0):
            self.calls = getattr(self, "calls", 0) + 1
            return x * self.scale + shift

    one, two = Model(), Model()
    x, two.scale = make(TwoTensor, 2, 3), 3.0
    for model in (one, two, one):
        yield model.apply(x), model.apply(x, shift=1), vars(model)


# ------------------------------------------------------------------------------- exceptions, contexts, output


@idiom
def exception_for_some_inputs(compile_):
    def fn(x, n):
        if n < 0:
            raise ValueError(f"n is {n}")
        return x * n

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    for n in (1, -1, 2, -2):
        yield raised(fn, x, n)


@idiom
def exception_half_way(compile_):
    def fn(x, state):
        state["steps"] = state.get("steps", 0) + 1
        state["x"].mul_(2)
        if state["steps"] == 2:
            raise UserError
        state["steps"] += 10
        return x * state["steps"]

    fn, state = compile_(fn), {"x": make(TwoTensor, 2, 3)}
    for _ in range(3):
        with contextlib.suppress(UserError):
            yield fn(make(TwoTensor, 2, 3), state)
        yield state


@idiom
def exception_caught_inside(compile_):
    def fn(x, options):
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

    fn, x = compile_(fn), make(Pair, 2, 3)
    for options in ({}, {"scale": 2}, {"scale": 9}, {"scale": 3}):
        yield fn(x, options)


@idiom
def exception_of_an_operator(compile_):
    def fn(x, w):
        try:
            return x + w
        except RuntimeError:
            return x

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    yield fn(x, torch.ones(3)), fn(x, torch.ones(4)), fn(x, torch.ones(2, 1))


@idiom
def assertions(compile_):
    def fn(x, n):
        assert n > 0, f"got {n}"
        assert x.shape[0] == 2
        return x * n

    fn, x = compile_(fn), make(Pair, 2, 3)
    yield fn(x, 1)
    try:
        fn(x, 0)
    except AssertionError as error:
        yield str(error)
    yield fn(x, 2)


@idiom
def users_context_manager(compile_):
    def fn(x, factor):
        with Scaled(factor) as entered:
            y = x * Scaled.active
        return y, entered.entered, Scaled.active

    fn = compile_(fn)
    for factor in (2.0, 3.0, 5.0):
        yield fn(make(TwoTensor, 2, 3), factor), Scaled.active


@idiom
def context_manager_as_an_argument(compile_):
    def fn(x, scope):
        y = x + 1
        with scope as entered:
            y = y * Scaled.active
        return y, entered.entered, Scaled.active

    fn, scope = compile_(fn), Scaled(2.0)
    for scope.factor in (2.0, 2.0, 5.0):
        yield fn(make(TwoTensor, 2, 3), scope), scope.entered


@idiom
def generator_context_manager(compile_):
    @contextlib.contextmanager
    def active(name):
        ACTIVE.append(name)
        try:
            yield len(ACTIVE)
        finally:
            ACTIVE.pop()

    def fn(x):
        with active("a") as one, active("b") as two:
            return x * one + two * len(ACTIVE)

    ACTIVE.clear()
    fn = compile_(fn)
    yield fn(make(TwoTensor, 2, 3)), ACTIVE
    ACTIVE.append("outside")
    yield fn(make(TwoTensor, 2, 3)), ACTIVE


@idiom
def exit_stack(compile_):
    def fn(x, grad):
        x = x + 1
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.nullcontext())
            if not grad:
                stack.enter_context(torch.no_grad())
            return x * 2

    fn, x = compile_(fn), make(TwoTensor, 2, 3, grad=True)
    yield fn(x, True), fn(x, False), fn(x, True)


@idiom
def printing(compile_):
    def fn(x, n):
        y = x * n
        print("n is", n, tuple(y.shape), sep="|")
        return y + 1

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    for n in (1, 2, 3, 3):
        with contextlib.redirect_stdout(io.StringIO()) as text:
            out = fn(x, n)
        yield out, text.getvalue()


@idiom
def logging_inside(compile_):
    logger = logging.Logger("idioms")
    text = io.StringIO()
    logger.addHandler(logging.StreamHandler(text))

    def fn(x, n):
        logger.warning("n is %s", n)
        return x * n

    fn, x = compile_(fn), make(Pair, 2, 3)
    for n in (1, 2, 2):
        yield fn(x, n), text.getvalue()


@idiom
def warning_inside(compile_):
    def fn(x, n):
        if n > 1:
            warnings.warn(f"n is {n}", stacklevel=1)
        return x * n

    fn, x = compile_(fn), make(TwoTensor, 2, 3)
    for n in (1, 2, 2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = fn(x, n)
        yield out, [str(note.message) for note in caught if "n is" in str(note.message)]
