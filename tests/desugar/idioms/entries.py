"""Idioms of the compiled function itself: what can be compiled, how often, and what happens to it between calls."""

from __future__ import annotations

import copy
import functools
import gc
import operator
from unittest import mock

import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.desugar.classes import Pair, make
from tests.desugar.idioms.running import (
    again,
    between,
    calling,
    idiom,
    idioms_of_calls,
    idioms_of_changes,
    put,
    raised,
    within,
    wrapper,
)
from tests.desugar.judge import backward

OFFSET = 1.0


class Base(nn.Module):
    def __init__(self, scale=2.0):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return x * self.scale


class Derived(Base):
    def forward(self, x, shift=0.0):
        return super().forward(x) + shift


# --------------------------------------------------------------------------------------------- what is compiled


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor


def generating(x, n):
    for step in range(n):
        yield x * step


idioms_of_calls(
    {
        "torch_function_compiled": (torch.sin, lambda fn, x: (fn(x), fn(make(Pair, 2, 3)))),
        "functional_compiled": (torch.nn.functional.relu, lambda fn, x: fn(x)),
        "method_of_tensors_compiled": (Tensor.cos, lambda fn, x: fn(x)),
        "operator_compiled": (operator.add, lambda fn, x: fn(x, 1)),
        "generator_function_compiled": (generating, lambda fn, x: (list(fn(x, n)) for n in (2, 3))),
        "objects_made_for_each_call": (
            lambda x, module: module(x) + module.scale,
            lambda fn, x: (fn(x, Base(scale)) for scale in (1.0, 2.0, 2.0, 3.0)),
        ),
        "more_variants_than_the_limit": (
            lambda x, name: (x * len(name), name),
            lambda fn, x: (fn(x, "a" * n) for n in (*range(12), 0, 11)),
        ),
        "exception_then_again": (
            lambda x, w: x.sin() @ w,
            lambda fn, x: (fails(fn, x, torch.ones(rows, 2)) for rows in (3, 5, 3)),
        ),
    }
)


def fails(fn, *args):
    """The result of a call, or whether it raises an error of PyTorch."""
    try:
        return fn(*args)
    except RuntimeError:
        return True


def scaling(scale):
    return lambda x: x * scale


def each(fns, held):
    return [fn(wrapper()) for fn in fns]


def shadowing_len(fn, held):
    shadowed = mock.patch(f"{__name__}.len", return_value=10, create=True)
    return within(lambda: fn(wrapper()), None, shadowed, None)


def of_a_dying_module(scale):
    return lambda held: (held.__setitem__(0, Base(scale)), gc.collect())


idioms_of_changes(
    {
        "partial_compiled": (
            lambda: functools.partial(lambda x, scale, shift=0: x * scale + shift, scale=2.0),
            *(None, lambda fn, part: (fn(wrapper()), fn(wrapper(), shift=1), fn(wrapper(), scale=3.0))),
            lambda part: part.keywords.update(scale=5.0),
        ),
        "callable_object_compiled": (
            lambda: Scale(2.0),
            *(lambda scale: [scale.__call__, Scale(7.0).__call__], each, put(factor=3.0)),
        ),
        "closures_of_one_code": (lambda: [scaling(float(n)) for n in (1, 2, 3)], None, each, again),
        "methods_of_many_objects": (
            lambda: [Base(float(n)) for n in range(4)],
            *(lambda models: [model.forward for model in models], each),
            lambda models: setattr(models[1], "scale", 11.0),
        ),
        "many_modules_of_one_class": (lambda: [Base(float(n)) for n in range(10)], None, each, again),
        "inherited_forward": (
            Derived,
            lambda module: [module, module.forward],
            lambda fns, module: [(fn(wrapper()), fn(wrapper(), shift=1.0), fn(wrapper(), 2.0)) for fn in fns],
            put(scale=3.0),
        ),
        "class_of_a_module_changed": (Derived, None, calling, put(__class__=Base)),
        "defaults_of_the_function_replaced": (
            lambda: lambda x, scale=2.0, *, shift=1.0: x * scale + shift,
            *(None, lambda fn, _: (raised(fn, wrapper()), fn(wrapper(), 4.0))),
            *(put(__defaults__=(3.0,)), put(__kwdefaults__={"shift": 5.0}), put(__defaults__=None)),
        ),
        "code_of_the_function_replaced": (
            lambda: lambda x: x * 2,
            *(None, calling, put(__code__=(lambda x: x + 5).__code__)),
        ),
        "global_deleted": (
            lambda: globals().update(OFFSET=1.0),
            *(lambda _: lambda x: x + OFFSET, lambda fn, _: raised(fn, wrapper())),
            *(lambda _: globals().pop("OFFSET"), lambda _: globals().update(OFFSET=2.0)),
        ),
        "builtin_shadowed": (lambda: None, lambda _: lambda x: x * len(x), shadowing_len),
        "guarded_module_dies": (
            lambda: [Base(2.0)],
            *(lambda holder: lambda x: holder[0](x), calling),
            *(of_a_dying_module(3.0), of_a_dying_module(2.0)),
        ),
    }
)


@idiom
def compiled_twice(compile_):
    scale = 2.0
    fn, x = lambda x: x * scale, make(TwoTensor, 2, 3)
    one, two = compile_(fn), compile_(fn)
    yield one(x), two(x), fn(x)
    scale = 3.0
    yield two(x), one(x), fn(x), compile_(one)(x)


@idiom
def compiled_function_calls_itself(compile_):
    def power(x, n):
        return x if n == 0 else fn(x, n - 1) * x

    fn = compile_(power)
    return (fn(make(TwoTensor, 2, 3), n) for n in (0, 1, 3, 2))


@idiom
def disabled_helper_calls_back(compile_):
    @torch.compiler.disable
    def helper(x, n):
        return fn(x, n - 1) if n else x

    fn = compile_(lambda x, n: helper(x * 2, n) + 1)
    return (fn(make(TwoTensor, 2, 3), n) for n in (0, 2, 1))


@idiom
def compiled_module_copied(compile_):
    module, x = Base(), make(TwoTensor, 2, 3)
    fn = compile_(module)
    yield fn(x)
    other = copy.deepcopy(fn)
    yield from between(
        lambda: (fn(x), other(x)),
        lambda: setattr(module, "scale", 5.0),
        lambda: setattr(other, "scale", 7.0),
    )


# ------------------------------------------------------------------------------------ what happens between calls


@idiom
def helper_defined_later(compile_):
    fn, x = compile_(lambda x: helper(x)), make(TwoTensor, 2, 3)
    yield raised(fn, x)

    def helper(x):
        return x * 2

    yield fn(x)
    first = helper
    helper = lambda x: first(x) + 1  # noqa: E731
    yield fn(x)


@idiom
def reset_between_calls(compile_):
    fn = compile_(lambda x, n: x * n)
    for n in (2, 3, 4):
        x = make(TwoTensor, 2, 3, grad=True)
        out = fn(x, n)
        torch._dynamo.reset()
        backward(out)
        yield out, x
