"""Globals, closures and settings that rules read, changed between calls: compiled code follows."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from desugar.flatten.rule_state import StateRead, state_read_by_rules
from subclasses import TensorSubclass, constant, inner
from tests.desugar.judge import WAYS

aten = torch.ops.aten

FACTOR = 2.0
BIASES = (1.0, 2.0)
TABLE = [1.0, 2.0]
NAMED = {"gain": 1.0}
NUM_CALLS = 0
SETTINGS = SimpleNamespace(power=2)


class Settings:
    sign = 1


def factor():
    return FACTOR


def make_class(shift):
    class Read(TensorSubclass, fallback="materialize"):
        data_: Tensor = inner()

        def materialize(self):
            return self.data_ * factor() + shift

        def scaled(self):
            return self.unwrap("data_") ** SETTINGS.power

    @Read.implements(aten.neg.default)
    def _(func, x):
        global NUM_CALLS
        NUM_CALLS += 1
        return Read((x.data_ - sum(BIASES) * NAMED["gain"]) * Settings.sign + TABLE[0])

    def change(value):
        nonlocal shift
        shift = value

    return Read, change


FUNCTIONS = {
    "materialize": lambda x: x.materialize() * 1,
    "fallback": lambda x: x.exp(),
    "rule": lambda x: (-x).exp(),
    "method": lambda x: x.scaled() + 1,
}


@pytest.mark.sweep(16)
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_change_between_two_calls_is_seen(name, way, needs_grad, monkeypatch):
    cls, change = make_class(0.5)
    x = cls(torch.randn(3, dtype=torch.float64)).requires_grad_(needs_grad)
    fn = FUNCTIONS[name]
    compiled = WAYS[way](fn)
    values = set()

    def compare():
        expected, got = fn(x), compiled(x)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        if needs_grad:
            found = [torch.autograd.grad(y.sum(), x, allow_unused=True)[0] for y in (expected, got)]
            torch.testing.assert_close(*(g.data_ if isinstance(g, cls) else g for g in found), rtol=0, atol=0)
        values.add(tuple(expected.tolist()))

    compare()
    for where, new in (("FACTOR", True), ("BIASES", (1.0, 3.0))):
        monkeypatch.setitem(globals(), where, new)
        compare()
    monkeypatch.setattr(SETTINGS, "power", 3)
    compare()
    monkeypatch.setattr(Settings, "sign", -1)
    compare()
    change(1.5)
    compare()
    monkeypatch.setitem(globals(), "TABLE", [1.0, 2.0])
    TABLE[0] = 3.0  # in place, as the dictionary
    compare()
    monkeypatch.setitem(NAMED, "gain", 2.0)
    compare()
    monkeypatch.undo()
    change(0.5)
    compare()
    assert len(values) > 1


class Scaled(TensorSubclass, fallback="materialize"):
    data_: Tensor = inner()

    def scale(self):
        return FACTOR

    def materialize(self):
        return self.data_ * FACTOR


class Shifts:
    def shift(self):
        return TABLE[0]


class ScaledTwice(Shifts, Scaled):
    def scale(self):
        return 0.0

    def materialize(self):
        return super().materialize() * super().scale() + super().shift()


@pytest.mark.parametrize("way", WAYS)
def test_a_method_that_super_calls(way, monkeypatch):
    x, compiled = ScaledTwice(torch.tensor([1.0, 2.0])), WAYS[way](torch.square)
    torch.testing.assert_close(compiled(x), torch.tensor([25.0, 81.0]))
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    torch.testing.assert_close(compiled(x), torch.tensor([100.0, 361.0]))
    monkeypatch.setitem(globals(), "TABLE", [2.0])
    torch.testing.assert_close(compiled(x), torch.tensor([121.0, 400.0]))


def test_the_reason_names_what_changed(monkeypatch, caplog):
    cls, _ = make_class(0.5)
    x, compiled = cls(torch.ones(3)), WAYS["pass"](FUNCTIONS["rule"])
    compiled(x)
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    with caplog.at_level("INFO", logger="desugar"):
        compiled(x)
    assert "a rule reads a value that has changed; FACTOR: expected 2.0, got 5.0" in caplog.text


def test_a_value_that_is_no_number_any_more_takes_part(monkeypatch):
    cls, _ = make_class(0.5)
    x, compiled = cls(torch.ones(3)), WAYS["pass"](FUNCTIONS["fallback"])
    compiled(x)
    for new in (torch.tensor(3.0).item(), float("nan"), 2, 2.0):
        monkeypatch.setitem(globals(), "FACTOR", new)
        torch.testing.assert_close(compiled(x), x.exp(), equal_nan=True)


def test_an_equal_value_makes_no_program(monkeypatch):
    cls, _ = make_class(0.5)
    x, compiled = cls(torch.ones(3)), WAYS["pass"](FUNCTIONS["rule"])
    compiled(x)
    monkeypatch.setitem(globals(), "FACTOR", float("2"))
    calls = NUM_CALLS
    compiled(x)
    assert calls == NUM_CALLS  # no rule ran, so nothing was traced
    assert len(compiled.programs) == 1


def test_what_is_read_is_found():
    cls, _ = make_class(0.5)
    graph = torch.fx.Graph()
    graph.output((graph.call_method("scaled", (graph.placeholder("x"),)),))
    found = state_read_by_rules(torch.fx.GraphModule({}, graph), [cls(torch.ones(3))])
    assert {read.name: read.value for read in found} == {
        "factor": factor,
        "SETTINGS": SETTINGS,
        "Settings": Settings,
        "FACTOR": 2.0,
        "BIASES": (1.0, 2.0),
        "TABLE": [1.0, 2.0],
        "NAMED": {"gain": 1.0},
        "shift": 0.5,
        "power": 2,
        "sign": 1,
    }  # and not NUM_CALLS, which the rule assigns


class Factor:
    """An object whose attribute is that of its class, and one with slots."""

    of_class = 2.0
    __slots__ = ("of_slot",)


class Multiply:
    def __init__(self, by):
        self.by = by

    def __call__(self, func, x):
        return x.data_ * FACTOR


def wrapped_with(read):
    @functools.wraps(read)
    def wrapper(*args):
        return read(*args) * FACTOR

    return wrapper


OBJECT = Factor()
OBJECT.of_slot = 2.0


@pytest.mark.sweep(6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "form", ["slot", "class attribute", "wrapper", "partial", "object", "method", "property", "another class"]
)
def test_where_state_is_read(form, way, monkeypatch):
    class Inside(TensorSubclass, fallback="materialize"):
        data_: Tensor = inner()

        def materialize(self):
            return self.data_ * FACTOR

    class Box(TensorSubclass, fallback="materialize"):
        data_: Tensor = inner()

        def by_global(self):
            return self.data_ * FACTOR

        @property
        def scaled(self):
            return self.data_ * FACTOR

        def materialize(self):
            if form == "slot":
                return self.data_ * OBJECT.of_slot
            if form == "class attribute":
                return self.data_ * OBJECT.of_class
            return {"method": self.by_global, "property": lambda: self.scaled}.get(form, self.data_.clone)()

    rules = {
        "wrapper": wrapped_with(lambda func, x: x.data_ + 0),
        "partial": functools.partial(lambda extra, func, x: x.data_ * FACTOR * extra, 1.0),
        "object": Multiply(1.0),
        "another class": lambda func, x: Inside(x.data_).exp(),
    }
    if form in rules:
        Box.implements(aten.neg.default)(rules[form])
    x, compiled = Box(torch.ones(3)), WAYS[way](lambda x: -x)
    for value in (2.0, 3.0):
        monkeypatch.setitem(globals(), "FACTOR", value)
        monkeypatch.setattr(Factor, "of_class", value)
        OBJECT.of_slot = value
        torch.testing.assert_close(compiled(x), -x)


def test_a_result_of_another_size_is_compiled_anew(monkeypatch):
    class Cut(TensorSubclass, fallback="materialize"):
        data_: Tensor = inner()

        def materialize(self):
            return self.data_

    @Cut.implements(aten.flip)
    def _(func, x, dims):
        return func(x.data_[: SETTINGS.power], dims)

    def sizes(x):
        y = x.flip(0)
        return y * y.shape[0]

    compiled, x = WAYS["pass"](sizes), Cut(torch.ones(4))
    for power in (2, 1, 3):
        monkeypatch.setattr(SETTINGS, "power", power)
        torch.testing.assert_close(compiled(x), sizes(x))


CALLS = {"count": 0}


def test_what_the_trace_changes_is_no_guard():
    class Counting(TensorSubclass, fallback="materialize"):
        data_: Tensor = inner()

        def materialize(self):
            CALLS["count"] += 1
            return self.data_

    compiled = WAYS["pass"](lambda x: x + 1)
    for _ in range(4):
        compiled(Counting(torch.ones(3)))
    assert len(compiled.programs) == 1


def test_code_that_nobody_has_a_file_of(monkeypatch):
    scope = {
        "TensorSubclass": TensorSubclass,
        "inner": inner,
        "Tensor": Tensor,
        "__name__": __name__,
        "K": 2.0,
    }
    exec(  # noqa: S102 - as `python -c` runs it
        "class Typed(TensorSubclass, fallback='materialize'):\n"
        "    data_: Tensor = inner()\n"
        "    def materialize(self): return self.data_ * K\n",
        scope,
    )
    compiled, x = WAYS["pass"](lambda x: x + 1), scope["Typed"](torch.ones(3))
    for scope["K"] in (2.0, 3.0):
        torch.testing.assert_close(compiled(x), x + 1)


def test_values_without_end_and_without_an_order_are_left_alone():
    endless = []
    endless.append(endless)
    for value in (endless, {1: object()}, [object()], (torch.ones(2),), list(range(1000))):
        read = StateRead.of({"x": value}, "x", value)
        assert read.is_as_traced() and read.value is value


@pytest.mark.parametrize(
    ("traced", "now"), [(1, True), (1, 1.0), (0.0, "0.0"), (0.0, -0.0), (None, False), ((1,), (1.0,))]
)
def test_values_of_two_types_differ(traced, now):
    assert StateRead.of({"x": traced}, "x", traced).is_as_traced()
    assert not StateRead.of({"x": now}, "x", traced).is_as_traced()
    assert not StateRead.of({}, "x", traced).is_as_traced()


def test_an_equal_object_is_the_same_value():
    traced = float("nan")
    assert StateRead({"x": float("nan")}, "x", traced).is_as_traced()


CONFIG = SimpleNamespace(scaling=SimpleNamespace(factor=2.0), other=SimpleNamespace())


@pytest.mark.sweep(6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ["global", "closure", "class"])
def test_attributes_of_attributes(form, way, monkeypatch):
    config = SimpleNamespace(scaling=SimpleNamespace(factor=2.0))

    class Box(TensorSubclass, fallback="materialize"):
        data_: Tensor = inner()
        settings = SimpleNamespace(scaling=SimpleNamespace(factor=2.0))

        def materialize(self):
            if form == "global":
                return self.data_ * CONFIG.scaling.factor
            factor = config.scaling.factor if form == "closure" else self.settings.scaling.factor
            return self.data_ * factor

    held = {"global": CONFIG, "closure": config, "class": Box.settings}[form]
    x, compiled = Box(torch.ones(3)), WAYS[way](lambda x: -x)
    for scaling in (held.scaling, SimpleNamespace(factor=4.0)):
        monkeypatch.setattr(held, "scaling", scaling)
        torch.testing.assert_close(compiled(x), -x)
        monkeypatch.setattr(scaling, "factor", 3.0)
        torch.testing.assert_close(compiled(x), -x)


def test_an_attribute_that_leads_to_no_value_is_left_alone():
    class Box(TensorSubclass, fallback="materialize"):
        data_: Tensor = inner()

        def materialize(self):
            found = torch.nn.functional if CONFIG.other == 3 else CONFIG.other
            return self.data_.mT.mT if found is None else CONFIG.scaling.missing.factor

    graph = torch.fx.Graph()
    graph.output(graph.placeholder("x"))
    assert state_read_by_rules(torch.fx.GraphModule({}, graph), [Box(torch.ones(3))]) == ()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("read", ["value", "method", "class"])
def test_a_constant_that_is_replaced(read, way):
    class Coded(TensorSubclass, fallback="materialize"):
        codes: Tensor = inner()
        levels = constant([1.0, 2.0])

        def materialize(self):
            if read == "class":
                return self.codes * Coded.levels.on("cpu")
            return self.codes * (self.levels if read == "value" else self.levels.clone())

    x, compiled = Coded(torch.ones(2)), WAYS[way](lambda x: x.sum())
    for levels in (Coded.levels, constant([3.0, 4.0]), constant([5.0, 6.0])):
        Coded.levels = levels
        assert compiled(x).item() == x.sum().item() == sum(levels.values)
