"""Globals, closures and settings that rules read, changed between calls: compiled code follows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from desugar.frontend.rule_state import StateRead, state_read_by_rules
from subclasses import TensorSubclass, inner
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
    for where, new in (("FACTOR", 3.0), ("FACTOR", True), ("BIASES", (1.0, 3.0))):
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
        "FACTOR": 2.0,
        "BIASES": (1.0, 2.0),
        "TABLE": [1.0, 2.0],
        "NAMED": {"gain": 1.0},
        "shift": 0.5,
        "power": 2,
        "sign": 1,
    }  # and not NUM_CALLS, which the rule assigns


def test_a_class_that_reads_nothing_costs_no_check():
    class Plain(TensorSubclass, fallback="materialize"):
        data_: Tensor = inner()

        def materialize(self):
            return self.data_ * 2

    compiled = WAYS["pass"](lambda x: x + 1)
    compiled(Plain(torch.ones(3)))
    assert "is_as_traced" not in compiled.programs[0].source


@pytest.mark.parametrize(
    ("traced", "now"), [(1, True), (1, 1.0), (0.0, "0.0"), (0.0, -0.0), (None, False), ((1,), (1.0,))]
)
def test_values_of_two_types_differ(traced, now):
    assert StateRead({"x": traced}, "x", traced).is_as_traced()
    assert not StateRead({"x": now}, "x", traced).is_as_traced()
    assert not StateRead({}, "x", traced).is_as_traced()


def test_an_equal_object_is_the_same_value():
    traced = float("nan")
    assert StateRead({"x": float("nan")}, "x", traced).is_as_traced()
