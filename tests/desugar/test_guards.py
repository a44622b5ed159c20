"""Programs depend on modes, arguments, numbers, modules and closures; a call that differs compiles anew."""

import contextlib
import copy
import functools
import math
from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch
from torch import nn

from tests.desugar.classes import EVERY, Labeled, Nested, Pair, Tagged, TwoTensor, make
from tests.desugar.judge import WAYS, assert_programs, by_pass, judge, switched
from tests.desugar.test_models import Net

none = contextlib.nullcontext
t = torch.randn


def product(x, y):
    return x * y + x.sin()


def three(*rest):
    """Returns a function that makes the arguments: a pair of three numbers, and `rest`."""
    return lambda: (make(Pair, 3), *rest)


# ---- the state around ----------------------------------------------------------------------------------------


def pair(cls=TwoTensor, *size, grad=(False, False)):
    size = size or (2, 6)
    return lambda: (make(cls, *size, grad=grad[0]), torch.randn(size[-1], requires_grad=grad[1]))


def autocast(*dtypes):
    """A product, and calls without and with autocast to a type."""
    contexts = [none if t is None else functools.partial(torch.autocast, "cpu", dtype=t) for t in dtypes]
    return lambda x: x @ torch.ones(3, 3), lambda: (make(Pair, 3, 3),), *contexts


# The function, its arguments, and the modes around one call each, which all need programs of their own.
AROUND = {
    "grad mode": (product, pair(grad=(True, True)), none, torch.no_grad),
    "inference mode": (product, pair(), torch.no_grad, torch.inference_mode, none),
    "autocast, bfloat16": autocast(None, torch.bfloat16),
    "autocast, float16": autocast(None, torch.float16),
    "dtype of autocast": autocast(torch.float16, torch.bfloat16),
    "default dtype": (
        lambda x: x + torch.ones(3),
        three(),
        *(none, lambda: switched(torch.set_default_dtype, torch.float64, torch.float32)),
    ),
    "default device": (lambda x: (x * 2, torch.ones(3)), three(), none, lambda: torch.device("meta")),
    "deterministic algorithms": (
        lambda x: x * (2 if torch.are_deterministic_algorithms_enabled() else 1),
        three(),
        *(none, lambda: switched(torch.use_deterministic_algorithms, True, False)),
    ),
}


# ---- arguments -----------------------------------------------------------------------------------------------


Point = namedtuple("Point", "x y")

A, B = torch.ones(2), torch.zeros(2)
ROWS, OTHERS_ROWS = torch.randn(2, 3), torch.randn(2, 3)
X = [make(TwoTensor, 2, 3), make(TwoTensor, 2, 3)]

# Calls of a product that all need programs of their own.
APART = {
    "inference tensors": [pair(), torch.inference_mode()(pair())],
    "requires_grad of each": [pair(grad=(a, b)) for a in (False, True) for b in (False, True)],
    "classes": [pair(cls) for cls in EVERY],
    "dtype and dims and strides": [
        pair(),
        lambda: (make(TwoTensor, 2, 6, dtype=torch.float64), torch.randn(6)),
        lambda: (make(TwoTensor, 2, 6), torch.randn(2, 6)),
        lambda: (TwoTensor(torch.randn(6, 2).t(), torch.randn(6, 2).t()), torch.randn(6)),
        lambda: (TwoTensor(torch.randn(2, 6), torch.randn(2, 6)), torch.randn(12)[::2]),
    ],
    "plain or wrapper or parameter": [
        lambda: (t(3), t(3)),
        lambda: (make(Pair, 3), t(3)),
        lambda: (t(3), make(Pair, 3)),
        lambda: (nn.Parameter(t(3)), t(3)),
    ],
    "metadata by hand": [lambda v=v: (Tagged(t(2, 3), t(2, 3), tag=v), t(3)) for v in ("u", "v")],
    "metadata declared": [lambda v=v: (Labeled(t(2, 3), t(2, 3), label=v), t(3)) for v in ("u", "v")],
    "absent inner tensors": [lambda: (Labeled(t(3)), t(3)), lambda: (Labeled(t(3), t(3)), t(3))],
    # Dynamo guards which inner tensors are one as well.
    "which arguments are one object": [
        lambda: (X[0], X[1]),
        lambda: (X[0], X[0]),
        lambda: (TwoTensor(ROWS, OTHERS_ROWS), TwoTensor(OTHERS_ROWS, ROWS)),
        lambda: (TwoTensor(ROWS, OTHERS_ROWS), TwoTensor(ROWS, OTHERS_ROWS)),
        lambda: (TwoTensor(ROWS, ROWS), TwoTensor(OTHERS_ROWS, OTHERS_ROWS)),
    ],
}


GLOBAL, GLOBAL_PAIR = torch.ones(3), make(TwoTensor, 3)
GLOBALS = [GLOBAL]

# A function of a global and an argument, and calls: the argument is the global, and is another object.
ONE_OBJECT = {
    "a tensor": (lambda x: x * 10 + GLOBAL, [lambda: (GLOBAL,), lambda: (t(3),)]),
    "a wrapper": (lambda x: x * 10 + GLOBAL_PAIR, [lambda: (GLOBAL_PAIR,), lambda: (make(TwoTensor, 3),)]),
    "a list": (lambda x: x[0] * 10 + GLOBALS[0], [lambda: (GLOBALS,), lambda: ([t(3)],)]),
    "a wrapper of which it is an inner tensor": (
        lambda x: x * GLOBAL_PAIR,
        [lambda: (t(3),), lambda: (GLOBAL_PAIR.a,)],
    ),
    "an inner tensor": (
        lambda x: x.a * 10 + GLOBAL,
        [lambda: (TwoTensor(GLOBAL, t(3)),), lambda: (make(TwoTensor, 3),)],
    ),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ONE_OBJECT)
def test_whether_an_argument_is_a_global(name, way):
    fn, calls = ONE_OBJECT[name]
    compiled = WAYS[way](fn)
    for make_args in calls * 2:
        judge(fn, make_args, compiled)


def test_a_wrapper_inside_of_two_others():
    pair, flat = make(Pair, 3), torch.randn(3)
    calls = [
        lambda: (make(Nested, 3), make(Nested, 3)),
        lambda: (Nested(pair, flat), Nested(pair, torch.randn(3))),
        lambda: (Nested(make(Pair, 3), flat), Nested(make(Pair, 3), flat)),
        lambda: (make(Nested, 3), pair),
    ]
    assert_programs(lambda x, y: x * 2, calls, 1)  # values that a function does not read have no guard
    assert_programs(lambda x, y: x * y, [lambda: (Nested(pair, flat), Nested(pair, flat))], 1)


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda d: defaultdict(list, d), None])
def test_the_order_of_a_dict_and_of_keyword_arguments(kind):
    compiled = by_pass(lambda x=None, **named: torch.stack([*(x["k"] if x else named).values()]))
    for d in ({"a": A, "b": B}, {"b": B, "a": A}, {"b": A, "a": B}):
        assert torch.equal(compiled({"k": kind(d)}) if kind else compiled(**d), torch.stack([*d.values()]))
    assert len(compiled.programs) == 2


# ---- constants -----------------------------------------------------------------------------------------------

CONSTANTS = [1, True, 1.0, 2, 2.0, 1j, math.inf]


def test_constants_by_type_and_value():
    """Ints share a program from the third one on, and so do floats."""
    compiled = assert_programs(lambda x, n: x * n, [lambda n=n: (make(Pair, 3), n) for n in CONSTANTS], 6)
    for n in (5, 6, 3.5, 4.5):
        judge(lambda x, n: x * n, lambda n=n: (make(Pair, 3), n), compiled)
    assert len(compiled.programs) == 6


class Scale:
    """Equal to any other object."""

    def __init__(self, by):
        self.by = by

    def __eq__(self, other):
        return True

    __hash__ = None  # type: ignore[assignment]


OTHERS = {
    "str": (lambda x, n: x * 2 if n == "a" else x + 1, ["a", "b"]),
    "dtype": (lambda x, n: x.to(n), [torch.float64, torch.bfloat16]),
    "slice": (lambda x, n: (x * 2)[n] + 0, [slice(0, 2), slice(1, 2), 0]),
    "None": (lambda x, n: x * 2 if n is None else x * n, [None, 3]),
    "list": (lambda x, n: x * int(n[0]), [["1"], ["2"], ("1",), ["1", "2"]]),
    "function": (lambda x, n: n(x), [torch.sin, torch.cos]),
    "device": (lambda x, n: x + torch.zeros(2, device=n)[0], [torch.device("cpu"), "cpu"]),
    "Size": (lambda x, n: x.reshape(n) * 2, [torch.Size([2, 2]), (2, 2), torch.Size([4, 1])]),
    "equal objects of an unknown type": (lambda x, s: x * s.by, [Scale(2), Scale(3)]),
}


# The function, its calls, how many programs they make, and the mode around each call.
PROGRAMS = {
    **{
        f"around: {name}": (fn, [call] * len(around), len(around), around)
        for name, (fn, call, *around) in AROUND.items()
    },
    **{f"apart: {name}": (product, calls, len(calls)) for name, calls in APART.items()},
    **{
        f"constant: {name}": (fn, [lambda n=n: (make(Pair, 4), n) for n in values], len(values))
        for name, (fn, values) in OTHERS.items()
    },
    "nan is nan": (
        lambda x, n: torch.copysign(x, torch.tensor(n)),
        [lambda n=n: (torch.ones(3), n) for n in (math.nan, float("nan"))],
        1,
    ),
    # The order of a dict's keys counts.
    "structure": (
        lambda d: sum(d.values()) * 2 if isinstance(d, dict) else d[0] * 2,
        [
            lambda: ({"a": t(3)},),
            lambda: ({"a": t(3), "b": t(3)},),
            lambda: ({"b": t(3), "a": t(3)},),
            lambda: ([t(3)],),
            lambda: ((t(3),),),
            lambda: (t(3),),
            lambda: (Point(t(3), t(3)),),
        ],
        7,
    ),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_needs_a_program_of_its_own(name):
    assert_programs(*PROGRAMS[name])


# ---- modules -------------------------------------------------------------------------------------------------


# Changes in order, each with how many programs there are then.
CHANGES = {
    "training of each submodule": [
        (lambda module: None, 1),
        (lambda module: module.eval(), 2),
        (lambda module: module.train(), 2),
        (lambda module: module.drop.eval(), 2),  # which is all that the function looks at
    ],
    # A tensor of the same kind in the place of another one needs no program of its own.
    "parameters and buffers": [
        (lambda module: module.eval(), 1),
        (lambda module: torch._foreach_mul_([module.linear.weight.detach(), module.shift], 2), 1),
        (lambda module: setattr(module.linear, "weight", nn.Parameter(torch.randn(6, 6))), 1),
        (lambda module: setattr(module, "shift", torch.zeros(6)), 1),
        (lambda module: module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True), 1),
        (lambda module: setattr(module.linear, "bias", None), 2),
        (lambda module: setattr(module, "shift", torch.zeros(6, dtype=torch.float64)), 3),
    ],
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_a_module(name):
    module = Net()
    compiled = by_pass(module)
    for change, count in CHANGES[name]:
        change(module)
        judge(module, lambda: (torch.randn(2, 6),), compiled, missing=[0])
        assert len(compiled.programs) == count


# ---- closures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [[], [torch.ones(3, requires_grad=True)]])
def test_a_tensor_from_outside_that_is_the_argument(before):
    w = torch.ones(3, requires_grad=True)
    compiled = by_pass(lambda x: x * w)
    list(map(compiled, before))
    (grad,) = torch.autograd.grad(compiled(w), w, torch.ones(3))
    assert grad.tolist() == [2, 2, 2]
