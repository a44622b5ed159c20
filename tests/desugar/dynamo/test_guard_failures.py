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

from desugar.dynamo.guard_failures import in_words, short, values_in
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


def other_type(name, cls, wanted="Tensor"):
    """The text for a value of another type; before 2.14, Dynamo does not name the expected type."""
    return f"type of {name}: expected {'a tensor type' if torch.__version__ < '2.14' else wanted}, got {cls}"


# Function, arguments of the first call, arguments of the second call, and the reason in the report.
FAILURES = [
    (add, (ones(2), ones(2)), (ones(3), ones(3)), "x.size(0): expected 2, got 3"),
    (twice, (ones(2),), (ones(2, 2),), "x.rank: expected 1, got 2"),
    (twice, (ones(2),), (ones(2).double(),), "x.dtype: expected Float, got Double"),
    (twice, (ones(2),), (ones(2, requires_grad=True),), "x.requires_grad: expected False, got True"),
    (twice, (ones(2),), (Pair(X, X),), other_type("x", "Pair")),
    (twice, (Pair(X, X),), (ones(2),), "type(x) is Pair; now: x = a Tensor"),
    (twice, (ones(2),), (nn.Parameter(X),), other_type("x", "Parameter")),
    (twice, (nn.Parameter(X),), (ones(2),), other_type("x", "Tensor", "Parameter")),
    (times, (ones(2), ones(2)), (ones(2), 3), other_type("n", "int")),
    (times, (ones(2), 3), (ones(2), ones(2)), "n: expected 3, got a Tensor"),
    (times, (ones(2), 3), (ones(2), 4), "n: expected 3, got 4"),
    (times, (ones(2), 0.5), (ones(2), 0.25), "n: expected 0.5, got 0.25"),
    (times, (ones(2), True), (ones(2), False), "n: expected True, got False"),
    (either, (X,), (X, X), "y is None; now: y = a Tensor"),
    (either, (X, X), (X,), other_type("y", "NoneType")),
    (lambda x, o: x * 2 if o == "a" else x * 3, (X, "a"), (X, "b"), "o: expected 'a', got 'b'"),
    (
        lambda x, c: x * c.value,
        (X, Color.RED),
        (X, Color.BLUE),
        "c is the same Color; now: c = <Color.BLUE: 2>",
    ),
    (
        lambda x, t: x.to(t),
        (X, torch.float64),
        (X, torch.half),
        "t: expected torch.float64, got torch.float16",
    ),
    (lambda x, c: x * c.scale, (X, Config(1)), (X, Config(2)), "c.scale: expected 1, got 2"),
    (total, ([X, X],), ([X, X, X],), "len(xs) == 2; now: xs = [a Tensor, a Tensor, a Tensor]"),
    (total, ((X, X),), ([X, X],), "type(xs) is tuple; now: xs = [a Tensor, a Tensor]"),
    (total, ({"a": X},), ({"b": X},), "list(dict.keys(xs))[0] == 'a'; now: xs = {'b': a Tensor}"),
    (total, ({"a": X},), ({"a": X, "b": X},), "len(xs) != 1; now: xs = {'a': a Tensor, 'b': a Tensor}"),
    (
        lambda d: d["x"] * d["by"][0],
        ({"x": X, "by": [2]},),
        ({"x": X, "by": [3]},),
        "d['by'][0]: expected 2, got 3",
    ),
    (add, (X, X), (X, ones(2)), "x is y; now: x = a Tensor, y = a Tensor"),
    (add, (X, ones(2)), (X, X), 'Duplicate tensors found: ["x", "y"]'),
    (twice, (Labeled(X, X, label="a"),), (Labeled(X, X, label="b"),), "x.label: expected 'a', got 'b'"),
    (
        twice,
        (Tagged(X, X, "a"),),
        (Tagged(X, X, "b"),),
        "metadata of x: expected {'tag': 'a'}, got {'tag': 'b'}",
    ),
    (twice, (Optional(X, X),), (Optional(X),), "inner tensors of x: expected values, zero, got values"),
    (twice, (Pair(X, ones(2)),), (Pair(X, ones(2).double()),), "x.b.dtype: expected Float, got Double"),
]
IDS = [failure[3] for failure in FAILURES]

# Facts of which Dynamo's text has both values, or which layouts contain.
IN_TEXT = re.compile(r"size\(|rank|x\.dtype|b\.dtype|requires_grad|type of|label|metadata|inner tensors")


@pytest.mark.sweep(18)
@pytest.mark.parametrize(("fn", "first", "second", "says"), FAILURES, ids=IDS)
def test_what_failed_is_said_with_both_values(fn, first, second, says):
    assert reasons_of(by_pass(fn), first, second) == ["", says]


@pytest.mark.sweep(14)
@pytest.mark.parametrize(("fn", "first", "second", "says"), FAILURES, ids=IDS)
def test_behind_dynamo_values_that_only_the_frame_knows_are_left_out(fn, first, second, says):
    found = reasons_of(by_torch(fn), first, second)
    assert found == [
        "",
        says
        if IN_TEXT.search(says)
        else re.sub(r": expected (.+), got .+", r" == \1", says).partition("; now: ")[0],
    ]


# ------------------------------------------------------------------------------------------------------- sizes

SMALL = "2 <= x.size(0) <= 9; now: x.size(0) = 40"
ODD = "(x.size(0) % 4) != 0; now: x.size(0) = 8"
SIZES = [
    (lambda x: x * 2 if x.shape[0] < 10 else x, (ones(4),), (ones(40),), SMALL),
    (lambda x: x * 2 if x.shape[0] % 4 else x, (ones(5),), (ones(8),), ODD),
    (twice, (ones(4),), (ones(1),), "2 <= x.size(0); now: x.size(0) = 1"),
    (
        add,
        (ones(4), ones(4)),
        (ones(4), ones(1)),
        "y.size(0) == x.size(0); now: y.size(0) = 1, x.size(0) = 4",
    ),
    (lambda x, n: x * n if n < 5 else x, (X, 3), (X, 7), "n <= 4; now: n = 7"),
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
        "len(args) == 2; now: args = (a Tensor, a Tensor, a Tensor)",
        "len(args) == 3; now: args = (a Tensor, a Tensor)",
        "len(kwargs) == 1; now: kwargs = {'bias': 1, 'scale': 2.0}",
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
            "self.t.dtype: expected Float, got Double": lambda holder: setattr(holder, "t", X.double()),
        },
    ),
    "globals and functions": (
        globals,
        lambda here: lambda x: helper(x) + 1,
        (X,),
        {
            "FACTOR: expected 2, got 3": lambda here: here.update(FACTOR=3),
            "helper is the same code; now: helper = twice": lambda here: here.update(helper=twice),
        },
    ),
    "a list in a closure": (
        lambda: [1, 2],
        lambda sizes: lambda x: x * len(sizes),
        (X,),
        {"len(sizes) == 2; now: sizes = [1, 2, 3]": lambda sizes: sizes.append(3)},
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
            "len(self.layers._modules) != 1; now: self.layers._modules = {'0': a Linear, '1': a Linear}": lambda net: (
                net.layers.append(nn.Linear(3, 3))
            ),
            "type(self.drop) is Dropout; now: self.drop = an Identity": lambda net: setattr(
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
    (lambda: within(torch.no_grad), "GLOBAL_STATE changed: grad_mode"),
    (lambda: within(functools.partial(torch.autocast, "cpu")), "GLOBAL_STATE changed: autocast(cpu)_enabled"),
    (lambda: within(functools.partial(torch.device, "cpu")), "___check_torch_function_mode_stack()"),
    (
        lambda: within(lambda: switched(torch.set_default_dtype, torch.float64, torch.float32)),
        "GLOBAL_STATE changed: default_dtype",
    ),
    (
        lambda: (torch.inference_mode()(ones)(2),),
        "tensor 'x' dispatch key set mismatch. expected DispatchKeySet(CPU, BackendSelect, ADInplaceOrView, "
        "AutogradCPU), actual DispatchKeySet(CPU, BackendSelect, ADInplaceOrView)",
    ),
    (
        lambda: (marked(),),
        "_has_dynamo_dim_marking is present on runtime tensor but was absent at compile time",
    ),
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
            [("", ""), ("o is None; now: o = <Odd", " instance at")],
        ),
    }
)


FOUND = [
    ("x.y == 1", {"x": Odd()}, {}, []),
    ("x.y[0]['k'].size()[1] > 2", {"x": SimpleNamespace(y=[{"k": ones(2, 3)}])}, {}, [3]),
    ("G['k'][1] == 'k'", {}, {"k": "ab"}, ["b"]),
    ("len(k)", {"k": "ab"}, {}, ["ab"]),
]
test_a_value_is_found_by_its_name = giving(
    {
        text: (
            lambda text=text, frame=frame, globals_=globals_: [*values_in(text, frame, globals_).values()],
            values,
        )
        for text, frame, globals_, values in FOUND
    }
)


TEXTS = [
    ("a text of a later release about L['x']._modules['a']", "a text of a later release about x.a"),
    (
        "not ___dict_contains('p', L['self'].__dict__)  # code",
        "not ___dict_contains('p', self.__dict__)",
    ),
    ("set.__contains__(L['s'], 'a')", "set.__contains__(s, 'a')"),
    ("o == 'a < b'", "o: expected 'a < b', got 'c'"),
    ("odd.y == 3", "odd.y == 3"),  # a value that cannot be read is left out
    ("len(n) == 3", "len(n) == 3; now: n = 5"),
    (
        "Cache line invalidated because L['x'] got deallocated",
        "Cache line invalidated because x got deallocated",
    ),
    ("Unable to find recompilation reasons", "Unable to find recompilation reasons"),
]
test_texts_of_dynamos = giving(
    {
        reason: (
            lambda reason=reason: in_words(reason, variables=({"o": "c", "odd": Odd(), "n": 5}, {})),
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
