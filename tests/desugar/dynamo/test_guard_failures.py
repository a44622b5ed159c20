"""The reason for a recompilation names the failed guard, the user's variable, and both values."""

from __future__ import annotations

import enum
import functools
import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from desugar.dynamo.guard_failures import UNKNOWN, Failure, describe_modes, find_value, in_words, short
from desugar.recording.listeners import listen
from subclasses import TensorSubclass, inner
from tests.desugar.classes import Labeled, Pair, Tagged
from tests.desugar.judge import by_pass, switched
from tests.doors import by_torch
from tests.tables import giving


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Config:
    scale: int = 1


class Optional(TensorSubclass, fallback="map"):
    values: torch.Tensor = inner()
    zero: torch.Tensor | None = inner(optional=True)


ones = torch.ones


def reasons_of(compiled, *calls):
    """Why each program is compiled while the calls are made, each of which is arguments, or a function."""
    found = []
    with listen(lambda recording: found.append(recording.failed)):
        for call in calls:
            call(compiled) if callable(call) else compiled(*call)
    return found


def add(x, y):
    return x + y


def twice(x):
    return x * 2


def times(x, n):
    return x * n


def either(x, y=None):
    return x * 2 if y is None else x * y


def total(xs):
    return sum(xs.values()) if isinstance(xs, dict) else sum(xs)


X = ones(2)

# Function, arguments of the first call, arguments of the second call, and the reason in the report.
FAILURES = [
    (add, (ones(2), ones(2)), (ones(3), ones(3)), "x.size(0): expected 2, got 3"),
    (twice, (ones(2),), (ones(2, 2),), "x.dim(): expected 1, got 2"),
    (twice, (ones(2),), (ones(2).double(),), "x.dtype: expected float32, got float64"),
    (twice, (ones(2),), (ones(2, requires_grad=True),), "x.requires_grad: expected False, got True"),
    (twice, (ones(2),), (Pair(X, X),), "type of x: expected Tensor, got Pair"),
    (twice, (Pair(X, X),), (ones(2),), "type of x: expected Pair, got Tensor"),
    (twice, (ones(2),), (nn.Parameter(X),), "type of x: expected Tensor, got Parameter"),
    (twice, (nn.Parameter(X),), (ones(2),), "type of x: expected Parameter, got Tensor"),
    (times, (ones(2), ones(2)), (ones(2), 3), "type of n: expected Tensor, got int"),
    (times, (ones(2), 3), (ones(2), ones(2)), "n: expected 3, got a Tensor"),
    (times, (ones(2), 3), (ones(2), 4), "n: expected 3, got 4"),
    (times, (ones(2), 0.5), (ones(2), 0.25), "n: expected 0.5, got 0.25"),
    (times, (ones(2), True), (ones(2), False), "n: expected True, got False"),
    (either, (X,), (X, X), "y: expected None, got a Tensor"),
    (either, (X, X), (X,), "type of y: expected Tensor, got NoneType"),
    (lambda x, o: x * 2 if o == "a" else x * 3, (X, "a"), (X, "b"), "o: expected 'a', got 'b'"),
    (
        lambda x, c: x * c.value,
        (X, Color.RED),
        (X, Color.BLUE),
        "c: expected the same Color as before, got <Color.BLUE: 2>",
    ),
    (
        lambda x, t: x.to(t),
        (X, torch.float64),
        (X, torch.half),
        "t: expected torch.float64, got torch.float16",
    ),
    (lambda x, c: x * c.scale, (X, Config(1)), (X, Config(2)), "c.scale: expected 1, got 2"),
    (total, ([X, X],), ([X, X, X],), "len(xs): expected 2, got 3"),
    (total, ((X, X),), ([X, X],), "type of xs: expected tuple, got list"),
    (total, ({"a": X},), ({"b": X},), "key 0 of xs: expected 'a', got 'b'"),
    (total, ({"a": X},), ({"a": X, "b": X},), "len(xs): expected 1, got 2"),
    (
        lambda d: d["x"] * d["by"][0],
        ({"x": X, "by": [2]},),
        ({"x": X, "by": [3]},),
        "d['by'][0]: expected 2, got 3",
    ),
    (add, (X, X), (X, ones(2)), "x is y: expected True, got False"),
    (add, (X, ones(2)), (X, X), "x is y: expected False, got True"),
    (twice, (Labeled(X, X, label="a"),), (Labeled(X, X, label="b"),), "x.label: expected 'a', got 'b'"),
    (
        twice,
        (Tagged(X, X, "a"),),
        (Tagged(X, X, "b"),),
        "metadata of x: expected {'tag': 'a'}, got {'tag': 'b'}",
    ),
    (twice, (Optional(X, X),), (Optional(X),), "inner tensors of x: expected values, zero, got values"),
    (twice, (Pair(X, ones(2)),), (Pair(X, ones(2).double()),), "x.b.dtype: expected float32, got float64"),
]
IDS = [failure[3] for failure in FAILURES]

# Facts of which Dynamo's text has both values, or which layouts contain.
IN_TEXT = re.compile(
    r"size|dim|dtype: |requires_grad| is |expected (Tensor|Parameter)|label|metadata|inner tensors"
)


@pytest.mark.sweep(18)
@pytest.mark.parametrize(("fn", "first", "second", "says"), FAILURES, ids=IDS)
def test_what_failed_is_said_with_both_values(fn, first, second, says):
    assert reasons_of(by_pass(fn), first, second) == ["", says]


@pytest.mark.sweep(14)
@pytest.mark.parametrize(("fn", "first", "second", "says"), FAILURES, ids=IDS)
def test_behind_dynamo_values_that_only_the_frame_knows_are_left_out(fn, first, second, says):
    found = reasons_of(by_torch(fn), first, second)
    assert found == ["", says if IN_TEXT.search(says) else says.partition(", got ")[0]]


# ------------------------------------------------------------------------------------------------------- sizes

SMALL = "expected 2 <= x.size(0) <= 9, got x.size(0) = 40"
ODD = "expected (x.size(0) % 4) != 0, got x.size(0) = 8"
SIZES = [
    (lambda x: x * 2 if x.shape[0] < 10 else x, (ones(4),), (ones(40),), SMALL),
    (lambda x: x * 2 if x.shape[0] % 4 else x, (ones(5),), (ones(8),), ODD),
    (twice, (ones(4),), (ones(1),), "expected 2 <= x.size(0), got x.size(0) = 1"),
    (
        add,
        (ones(4), ones(4)),
        (ones(4), ones(1)),
        "expected y.size(0) == x.size(0), got y.size(0) = 1, x.size(0) = 4",
    ),
    (lambda x, n: x * n if n < 5 else x, (X, 3), (X, 7), "expected n <= 4, got n = 7"),
]
STRIDES = (twice, (ones(2, 3),), (ones(3, 2).t(),), "x.stride(0): expected 3, got 1")


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("fn", "first", "second", "says", "dynamic"), [*((*case, True) for case in SIZES), (*STRIDES, False)]
)
def test_a_condition_on_sizes_is_said_with_what_came(fn, first, second, says, dynamic):
    assert reasons_of(by_pass(fn, dynamic=dynamic), first, second) == ["", says]


# ------------------------------------------------------------------------------ changes outside of the arguments


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.layers = nn.ModuleList([nn.Linear(3, 3)])

    def forward(self, x, *more, scale=1.0, **rest):
        for layer in self.layers:
            x = layer(x)
        return self.drop(x) * scale * len(more) + rest.get("bias", 0)


@pytest.mark.slow
def test_arguments_of_a_module_have_the_names_of_its_forward():
    x = ones(2, 3)
    calls = [
        lambda f: f(x, X, scale=2.0),
        lambda f: f(x.t().contiguous().t(), X, scale=2.0),
        lambda f: f(x, X, X, scale=2.0),
        lambda f: f(x, X, scale=3.0),
        lambda f: f(x, X, scale=2.0, bias=1),
    ]
    assert reasons_of(by_pass(Net()), *calls) == [
        "",
        "x.stride(0): expected 3, got 1",
        "number of arguments passed by position: expected 2, got 3",
        "number of arguments passed by position: expected 3, got 2",
        "number of arguments passed by name: expected 1, got 2",
    ]


class Holder:
    def __init__(self):
        self.n, self.t = 2, ones(2)

    def run(self, x):
        return x * self.n + self.t


FACTOR = 2


def helper(x):
    return x * FACTOR


# Each case: a function that makes an object, the function that is compiled, and its arguments. A dict maps each reason
# to a change of the object.
CHANGED = {
    "an object": (
        Holder,
        lambda holder: holder.run,
        (X,),
        {
            "self.n: expected 2, got 3": lambda holder: setattr(holder, "n", 3),
            "self.t.dtype: expected float32, got float64": lambda holder: setattr(holder, "t", X.double()),
        },
    ),
    "globals and functions": (
        globals,
        lambda here: lambda x: helper(x) + 1,
        (X,),
        {
            "FACTOR: expected 2, got 3": lambda here: here.update(FACTOR=3),
            "helper: expected the same function as before, got twice": lambda here: here.update(helper=twice),
        },
    ),
    "a list in a closure": (
        lambda: [1, 2],
        lambda sizes: lambda x: x * len(sizes),
        (X,),
        {"len(sizes): expected 2, got 3": lambda sizes: sizes.append(3)},
    ),
    "a number in a closure": (
        lambda: (lambda factor: lambda x: x * factor)(3),
        lambda fn: fn,
        (X,),
        {"factor: expected 3, got 4": lambda fn: setattr(fn.__closure__[0], "cell_contents", 4)},
    ),
    **{
        f"a module, {says}": (Net, lambda net: net, (ones(2, 3),) * 2, {says: change})
        for says, change in {
            "self.drop.p: expected 0.1, got 0.5": lambda net: setattr(net.drop, "p", 0.5),
            "self.drop.training: expected True, got False": nn.Module.eval,
            "self.layers[0].bias.requires_grad: expected True, got False": lambda net: net.requires_grad_(
                False
            ),
            "len(self.layers._modules): expected 1, got 2": lambda net: net.layers.append(nn.Linear(3, 3)),
            "type of self.drop: expected Dropout, got Identity": lambda net: setattr(
                net, "drop", nn.Identity()
            ),
        }.items()
    },
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", CHANGED)
def test_what_changes_between_calls_is_named(name, monkeypatch):
    monkeypatch.setitem(globals(), "FACTOR", FACTOR)  # and restored
    monkeypatch.setitem(globals(), "helper", helper)
    make_held, what, args, changes = CHANGED[name]
    held = make_held()
    steps = [step for change in changes.values() for step in (lambda f, c=change: c(held), args)]
    assert reasons_of(by_pass(what(held)), args, *steps) == ["", *changes]


def within(mode):
    """A call in a mode."""

    def call(f):
        with mode():
            f(X)

    return call


def marked():
    x = ones(2)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return x


OTHER_CALLS = [
    (lambda: within(torch.no_grad), "gradients: expected on, got off"),
    (lambda: within(functools.partial(torch.autocast, "cpu")), "autocast on cpu: expected off, got on"),
    (lambda: within(functools.partial(torch.device, "cpu")), "another mode: torch function modes"),
    (
        lambda: within(lambda: switched(torch.set_default_dtype, torch.float64, torch.float32)),
        "default dtype: expected another value, got float64",
    ),
    (
        lambda: (torch.inference_mode()(ones)(2),),
        "x: expected an ordinary tensor, got a tensor made in inference mode",
    ),
    (lambda: (marked(),), "a tensor has marked dimensions, and had none"),
]
test_modes_and_tensors_of_other_kinds_are_named = giving(
    {
        says: (lambda make=make: reasons_of(by_pass(twice), (X,), make()), ["", says])
        for make, says in OTHER_CALLS
    }
)


# --------------------------------------------------------------------------------------------------- and else


def breaks(x, n):
    y = x * n
    torch._dynamo.graph_break()
    return y + n


def test_what_the_call_holds_is_not_kept():
    compiled = by_pass(twice)
    compiled(X)
    assert compiled._calls._thread.call is None


class Odd:
    """A user's class with attributes and a repr that raise."""

    scale = 2

    def __getattr__(self, name):
        raise ValueError(name)

    def __repr__(self):
        raise ValueError("no")


test_all_that_is_said = giving(
    {
        "a function that breaks says it for each part": (
            lambda: reasons_of(by_pass(breaks), (X, 2), (ones(3), 2)),
            ["", "", "x.size(0): expected 2, got 3", "y.size(0): expected 2, got 3"],
        ),
        "an error in a user's class does not end a compilation": (
            lambda: [
                says.partition(" instance at")[:2]
                for says in reasons_of(
                    by_pass(lambda x, o: x * 2 if o is None else x * o.scale), (X, None), (X, Odd())
                )
            ],
            [("", ""), ("o: expected None, got <Odd", " instance at")],
        ),
    }
)


FOUND = [
    ("x.y", {"x": Odd()}, {}, UNKNOWN),
    ("x.y[0]['k'].size()[1]", {"x": SimpleNamespace(y=[{"k": ones(2, 3)}])}, {}, 3),
    ("G['k'][1]", {}, {"k": "ab"}, "b"),
    ("k()", {"k": 1}, {}, UNKNOWN),
]
test_a_value_is_found_by_its_name = giving(
    {
        name: (lambda name=name, frame=frame, globals_=globals_: find_value(name, frame, globals_), value)
        for name, frame, globals_, value in FOUND
    }
)


TEXTS = [
    ("a text of a later release about L['x']._modules['a']", "a text of a later release about x.a"),
    (
        "not ___dict_contains('p', L['self'].__dict__)  # code",
        "'p' in self.__dict__: expected False, got True",
    ),
    ("set.__contains__(L['s'], 'a')", "'a' in s: expected True, got False"),
    ("o == 'a < b'", "o: expected 'a < b', got 'c'"),
    ("odd.y == 3", "odd.y: expected 3"),  # a value that cannot be read is left out
    ("len(n) == 3", "len(n): expected 3"),
    (
        "Cache line invalidated because L['x'] got deallocated",
        "Cache line invalidated because x got deallocated",
    ),
    ("Unable to find recompilation reasons", "no guard fails any more"),
    (
        "tensor 'x' Tensor device index mismatch. Expected device index to be 0, actual 1",
        "x.device.index: expected 0, got 1",
    ),
    (
        "tensor 'x' dispatch key set mismatch. expected DispatchKeySet(CPU, ADInplaceOrView, AutogradCPU), actual "
        "DispatchKeySet(CUDA, ADInplaceOrView, AutogradCUDA)",
        "dispatch keys of x: expected AutogradCPU, CPU, got AutogradCUDA, CUDA",
    ),
]
test_texts_of_dynamos = giving(
    {
        reason: (
            lambda reason=reason: in_words(reason, Failure(frame={"o": "c", "odd": Odd(), "n": 5})),
            says,
        )
        for reason, says in TEXTS
    }
)


test_values_are_short = giving(
    {
        "by name": (lambda: [*map(short, (X, int, twice))], ["a Tensor", "int", "twice"]),
        "cut": (lambda: (len(short("x" * 200)), len(short([*range(10**6)])) < 80), (80, True)),
    }
)


# ------------------------------------------------------------------------------------------------------- modes


MODES = [
    ("grad_mode ", "gradients: expected off, got on"),
    ("autocast(cpu)_enabled ", "autocast on cpu: expected on, got off"),
    ("autocast(cpu)_dtype ", "dtype of autocast on cpu: expected another value, got bfloat16"),
    ("default_dtype ", "default dtype: expected another value, got float32"),
    ("a_mode_of_the_future ", "another mode: a_mode_of_the_future"),
    (
        "grad_mode deterministic_algorithms ",
        "gradients: expected off, got on; deterministic algorithms: expected on, got off",
    ),
]
test_the_present_value_is_read_and_a_switch_was_the_other_way = giving(
    {names: (lambda names=names: describe_modes(names), says) for names, says in MODES}
)
