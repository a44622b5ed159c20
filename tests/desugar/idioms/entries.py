"""Idioms of the compiled function itself: what can be compiled, how often, and what happens to it between calls."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import operator
from unittest import mock

import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.desugar.classes import Pair, Tagged, make
from tests.desugar.idioms.running import between, idiom, idioms_of_calls, raised, within
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


@idiom
def partial_compiled(compile_):
    part = functools.partial(lambda x, scale, shift=0: x * scale + shift, scale=2.0)
    fn, x = compile_(part), make(TwoTensor, 2, 3)
    change = functools.partial(part.keywords.__setitem__, "scale", 5.0)
    return between(lambda: (fn(x), fn(x, shift=1), fn(x, scale=3.0)), change)


@idiom
def callable_object_compiled(compile_):
    scale, x = Scale(2.0), make(TwoTensor, 2, 3)
    fn, other = compile_(scale.__call__), compile_(Scale(7.0).__call__)
    return between(lambda: (fn(x), other(x)), lambda: setattr(scale, "factor", 3.0))


@idiom
def closures_of_one_code(compile_):
    def factory(scale):
        return lambda x: x * scale

    fns, x = [compile_(factory(scale)) for scale in (1.0, 2.0, 3.0)], make(TwoTensor, 2, 3)
    return ([fn(x) for fn in fns] for _ in range(2))


@idiom
def methods_of_many_objects(compile_):
    models, x = [Base(float(scale)) for scale in range(4)], make(TwoTensor, 2, 3)
    fns = [compile_(model.forward) for model in models]
    return between(lambda: [fn(x) for fn in fns], lambda: setattr(models[1], "scale", 11.0))


@idiom
def many_modules_of_one_class(compile_):
    fns, x = [compile_(Base(float(scale))) for scale in range(10)], make(Pair, 2, 3)
    return ([fn(x) for fn in fns] for _ in range(2))


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
def inherited_forward(compile_):
    module, x = Derived(), make(TwoTensor, 2, 3)
    fn, method = compile_(module), compile_(module.forward)
    yield fn(x), fn(x, shift=1.0), method(x, 2.0)
    module.scale = 3.0
    yield fn(x), fn(x, 1.0), method(x)
    module.__class__ = Base
    yield fn(x)


@idiom
def used_through_the_compiled_module(compile_):
    module, x = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), make(Tensor, 2, 3)
    fn = compile_(module)
    yield fn(x), fn.training, len(list(fn.parameters()))
    fn.eval()
    yield fn(x), module.training, getattr(fn, "1").p
    fn.tag = 3
    yield fn.tag, module.tag, isinstance(fn, nn.Module)
    fn.to(torch.float64)
    yield fn(x.double()), getattr(fn, "0").weight.dtype


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


@idiom
def looks_like_the_function(compile_):
    def fn(x, scale: float = 2.0, *, shift=0):
        """Scales."""
        return x * scale + shift

    fn.note = "mine"
    compiled = compile_(fn)
    compiled(make(TwoTensor, 2, 3))
    yield compiled.__name__, compiled.__doc__, str(inspect.signature(compiled)), compiled.note


# ------------------------------------------------------------------------------------ what happens between calls


@idiom
def defaults_of_the_function_replaced(compile_):
    def fn(x, scale=2.0, *, shift=1.0):
        return x * scale + shift

    compiled, x = compile_(fn), make(TwoTensor, 2, 3)
    return between(
        lambda: (raised(compiled, x), compiled(x, 4.0)),
        lambda: setattr(fn, "__defaults__", (3.0,)),
        lambda: setattr(fn, "__kwdefaults__", {"shift": 5.0}),
        lambda: setattr(fn, "__defaults__", None),
    )


@idiom
def code_of_the_function_replaced(compile_):
    def fn(x):
        return x * 2

    compiled, x = compile_(fn), make(TwoTensor, 2, 3)
    return between(lambda: compiled(x), lambda: setattr(fn, "__code__", (lambda x: x + 5).__code__))


@idiom
def global_deleted(compile_):
    globals()["OFFSET"] = 1.0
    fn, x = compile_(lambda x: x + OFFSET), make(TwoTensor, 2, 3)
    return between(
        lambda: raised(fn, x),
        lambda: globals().pop("OFFSET"),
        lambda: globals().update(OFFSET=2.0),
    )


@idiom
def builtin_shadowed(compile_):
    fn, x = compile_(lambda x: x * len(x)), make(TwoTensor, 2, 3)
    shadowed = mock.patch(f"{__name__}.len", return_value=10, create=True)
    return within(lambda: fn(x), None, shadowed, None)


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
def guarded_module_dies(compile_):
    holder = [Base(2.0)]
    fn, x = compile_(lambda x: holder[0](x)), make(TwoTensor, 2, 3)
    for scale in (3.0, 2.0, 4.0):
        yield fn(x)
        holder[0] = Base(scale)
        gc.collect()


@idiom
def reset_between_calls(compile_):
    fn = compile_(lambda x, n: x * n)
    for n in (2, 3, 4):
        x = make(TwoTensor, 2, 3, grad=True)
        out = fn(x, n)
        torch._dynamo.reset()
        backward(out)
        yield out, x


@idiom
def stances_between_calls(compile_):
    fn, x = compile_(lambda x, n: x * n), make(TwoTensor, 2, 3)
    yield fn(x, 1.5)
    for stance in ("force_eager", "default", "eager_on_recompile"):
        with torch.compiler.set_stance(stance):
            out = fn(x, 1.5), fn(make(Tagged, 2, 3), 2.5)
        yield out


@idiom
def profiler_around(compile_):
    fn, x = compile_(lambda x: x.sin()), make(TwoTensor, 2, 3)
    profile = torch.autograd.profiler.profile()
    yield from within(lambda: fn(x), None, profile, None)
    yield any(event.name == "aten::sin" for event in profile.function_events)
