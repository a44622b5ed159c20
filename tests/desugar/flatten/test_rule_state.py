"""Values that a rule reads from outside may change between calls, as may storage offsets; compiled code follows."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from desugar.errors import DesugarError
from desugar.flatten.inputs import check_plain
from desugar.flatten.rule_state import StateRead, state_read_by_rules
from subclasses import TensorSubclass, constant, inner
from tests.desugar.classes import Pair
from tests.desugar.judge import BACKEND_DOORS, WAYS, by_pass, judge

aten = torch.ops.aten

FACTOR, BIASES, TABLE, NAMED, NUM_CALLS, CALLS = 2.0, (1.0, 2.0), [1.0, 2.0], {"gain": 1.0}, 0, {"count": 0}
CONFIG = SimpleNamespace(scaling=SimpleNamespace(factor=2.0), other=SimpleNamespace())
SETTINGS = SimpleNamespace(power=2)


class Settings:
    sign = 1


def factor():
    return FACTOR


class Held(TensorSubclass, fallback="materialize"):
    data_: Tensor = inner()

    def materialize(self):
        return self.data_


def class_with(materialize=Held.materialize, rule=None, **members):
    """A class with some methods and attributes, and maybe a rule for the negative."""
    cls = type("Box", (Held,), {"materialize": materialize, **members})
    if rule is not None:
        cls.implements(aten.neg.default)(rule)
    return cls


def make_class(shift):
    """Returns a class whose rule reads many variables, and a function that changes a variable of its closure."""

    def rule(func, x):
        global NUM_CALLS
        NUM_CALLS += 1
        return cls((x.data_ - sum(BIASES) * NAMED["gain"]) * Settings.sign + TABLE[0])

    def change(value):
        nonlocal shift
        shift = value

    cls = class_with(
        lambda self: self.data_ * factor() + shift,
        rule,
        scaled=lambda self: self.unwrap("data_") ** SETTINGS.power,
    )
    return cls, change


FUNCTIONS = {
    "materialize": lambda x: x.materialize() * 1,
    "fallback": lambda x: x.exp(),
    "rule": lambda x: (-x).exp(),
    "method": lambda x: x.scaled() + 1,
}
CHANGES = [
    lambda patch, change: None,
    lambda patch, change: patch.setitem(globals(), "FACTOR", True),
    lambda patch, change: patch.setitem(globals(), "BIASES", (1.0, 3.0)),
    lambda patch, change: patch.setattr(SETTINGS, "power", 3),
    lambda patch, change: patch.setattr(Settings, "sign", -1),
    lambda patch, change: change(1.5),
    # In place, as the dictionary.
    lambda patch, change: (patch.setitem(globals(), "TABLE", [1.0, 2.0]), TABLE.__setitem__(0, 3.0)),
    lambda patch, change: patch.setitem(NAMED, "gain", 2.0),
    lambda patch, change: (patch.undo(), change(0.5)),
]


@pytest.mark.sweep(32)
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_change_between_two_calls_is_seen(name, way, needs_grad, monkeypatch):
    cls, change = make_class(0.5)
    fn, values = FUNCTIONS[name], set()
    compiled = WAYS[way](fn)
    for do in CHANGES:
        do(monkeypatch, change)
        judge(
            fn,
            lambda: (cls(torch.randn(3, dtype=torch.float64)).requires_grad_(needs_grad),),
            compiled,
            rtol=0,
            atol=0,
        )
        values.add(tuple(fn(cls(torch.full((3,), 1.5))).tolist()))
    assert len(values) > 1


class Scaled(Held):
    def scale(self):
        return FACTOR

    def materialize(self):
        return self.data_ * FACTOR


class Shifts:
    def shift(self):
        return FACTOR


class ScaledTwice(Shifts, Scaled):
    def scale(self):
        return 0.0

    def materialize(self):
        return super().materialize() * super().scale() + super().shift()


def compiled_once(name):
    """(a value, a function that was compiled for it)."""
    x, compiled = make_class(0.5)[0](torch.ones(3)), by_pass(FUNCTIONS[name])
    compiled(x)
    return x, compiled


def test_the_reason_names_what_changed(monkeypatch, caplog):
    x, compiled = compiled_once("rule")
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    with caplog.at_level("INFO", logger="desugar"):
        compiled(x)
    assert "a rule reads a value that has changed; FACTOR: expected 2.0, got 5.0" in caplog.text


def test_a_value_that_is_no_number_any_more_takes_part(monkeypatch):
    x, compiled = compiled_once("fallback")
    for new in (torch.tensor(3.0).item(), float("nan"), 2, 2.0):
        monkeypatch.setitem(globals(), "FACTOR", new)
        torch.testing.assert_close(compiled(x), x.exp(), equal_nan=True)


def test_an_equal_value_makes_no_program(monkeypatch):
    x, compiled = compiled_once("rule")
    monkeypatch.setitem(globals(), "FACTOR", float("2"))
    calls = NUM_CALLS
    compiled(x)
    assert calls == NUM_CALLS and len(compiled.programs) == 1  # no rule ran, so nothing was traced


def state_read(cls, method=None):
    """The state that a graph of one method of a value, or of the value alone, reads."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_method(method, (x,)),) if method else x)
    return state_read_by_rules(torch.fx.GraphModule({}, graph), [cls(torch.ones(3))])


def test_what_is_read_is_found():
    found = state_read(make_class(0.5)[0], "scaled")
    # `cls` is the class that the rule constructs; NUM_CALLS, which the rule assigns, is not here.
    assert {read.name: read.value for read in found if read.name != "cls"} == {
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
    }


def test_reads_are_in_one_order():
    """In each process, since the key of a stored program has them in their order."""
    factors = {f"factor_{name}": 2.0 for name in "abcdefgh"}
    code = f"lambda self: self.data_ * {' * '.join(f'self.{name}' for name in reversed(factors))}"
    assert [read.name for read in state_read(class_with(eval(code), **factors))] == list(factors)


class Factor:
    """An object that reads one attribute from its class, and one from a slot."""

    of_class = 2.0
    __slots__ = ("of_slot",)


class Multiply:
    def __call__(self, func, x):
        return x.data_ * FACTOR


def wrapped_with(read):
    @functools.wraps(read)
    def wrapper(*args):
        return read(*args) * FACTOR

    return wrapper


OBJECT = Factor()
Inside = class_with(lambda self: self.data_ * FACTOR)
FORMS = {
    "slot": lambda: class_with(lambda self: self.data_ * OBJECT.of_slot),
    "class attribute": lambda: class_with(lambda self: self.data_ * OBJECT.of_class),
    "method": lambda: class_with(lambda self: self.by_global(), by_global=lambda self: self.data_ * FACTOR),
    "property": lambda: class_with(
        lambda self: self.scaled, scaled=property(lambda self: self.data_ * FACTOR)
    ),
    "wrapper": lambda: class_with(rule=wrapped_with(lambda func, x: x.data_ + 0)),
    "partial": lambda: class_with(
        rule=functools.partial(lambda extra, func, x: x.data_ * FACTOR * extra, 1.0)
    ),
    "object": lambda: class_with(rule=Multiply()),
    "what super finds": lambda: ScaledTwice,
    "attribute of an attribute": lambda: class_with(lambda self: self.data_ * CONFIG.scaling.factor),
    "attribute of one of a closure": lambda: (
        lambda config: class_with(lambda self: self.data_ * config.scaling.factor)
    )(CONFIG),
    "attribute of one of the class": lambda: class_with(
        lambda self: self.data_ * self.settings.scaling.factor, settings=CONFIG
    ),
    "another class": lambda: class_with(rule=lambda func, x: Inside(x.data_).exp()),
}


@pytest.mark.sweep(12)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_where_state_is_read(form, way, monkeypatch):
    x, compiled = FORMS[form]()(torch.ones(3)), WAYS[way](lambda x: -x)
    for value, scaling in ((2.0, CONFIG.scaling), (3.0, CONFIG.scaling), (4.0, SimpleNamespace())):
        monkeypatch.setitem(globals(), "FACTOR", value)
        monkeypatch.setattr(Factor, "of_class", value)
        monkeypatch.setattr(CONFIG, "scaling", scaling)
        monkeypatch.setattr(scaling, "factor", value, raising=False)
        OBJECT.of_slot = value
        torch.testing.assert_close(compiled(x), -x)


def test_a_result_of_another_size_is_compiled_anew(monkeypatch):
    cls, fn = class_with(), lambda x: (lambda y: y * y.shape[0])(x.flip(0))
    cls.implements(aten.flip)(lambda func, x, dims: func(x.data_[: SETTINGS.power], dims))
    compiled, x = by_pass(fn), cls(torch.ones(4))
    for power in (2, 1, 3):
        monkeypatch.setattr(SETTINGS, "power", power)
        torch.testing.assert_close(compiled(x), fn(x))


class Counting(Held):
    def materialize(self):
        CALLS["count"] += 1
        return self.data_


def test_what_the_trace_changes_is_no_guard():
    compiled = by_pass(lambda x: x + 1)
    for _ in range(4):
        compiled(Counting(torch.ones(3)))
    assert len(compiled.programs) == 1


def test_code_that_nobody_has_a_file_of():
    scope = {"Held": Held, "__name__": __name__, "K": 2.0}
    exec(  # noqa: S102 - as `python -c` runs it
        "class Typed(Held):\n    def materialize(self): return self.data_ * K\n", scope
    )
    compiled, x = by_pass(lambda x: x + 1), scope["Typed"](torch.ones(3))
    for scope["K"] in (2.0, 3.0):
        torch.testing.assert_close(compiled(x), x + 1)


ENDLESS: list = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    "value",
    [ENDLESS, {1: object()}, [object()], (torch.ones(2),), list(range(1000))],
    ids=lambda v: type(v).__name__,
)
def test_values_without_end_and_without_an_order_are_left_alone(value):
    read = StateRead.of({"x": value}, "x", value)
    assert read.is_as_traced() and read.value is value


@pytest.mark.parametrize(
    ("traced", "now"), [(1, True), (1, 1.0), (0.0, "0.0"), (0.0, -0.0), (None, False), ((1,), (1.0,))]
)
def test_values_of_two_types_differ(traced, now):
    assert StateRead.of({"x": traced}, "x", traced).is_as_traced()
    assert not StateRead.of({"x": now}, "x", traced).is_as_traced()
    assert not StateRead.of({}, "x", traced).is_as_traced()
    assert StateRead({"x": float("nan")}, "x", float("nan")).is_as_traced()


def leading_nowhere(self):
    found = torch.nn.functional if CONFIG.other == 3 else CONFIG.other
    return self.data_.mT.mT if found is None else CONFIG.scaling.missing.thing


def test_an_attribute_that_leads_to_no_value_is_left_alone():
    assert state_read(class_with(leading_nowhere)) == ()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("read", ["value", "method", "class"])
def test_a_constant_that_is_replaced(read, way):
    materialize = {
        "value": lambda self: self.data_ * self.levels,
        "method": lambda self: self.data_ * self.levels.clone(),
        "class": lambda self: self.data_ * coded.levels.on("cpu"),
    }[read]
    coded = class_with(materialize, levels=constant([1.0, 2.0]))
    x, compiled = coded(torch.ones(2)), WAYS[way](lambda x: x.sum())
    for levels in (coded.levels, constant([3.0, 4.0]), constant([5.0, 6.0])):
        coded.levels = levels
        assert compiled(x).item() == x.sum().item() == sum(levels.values)


# ---- where a tensor begins in its storage is part of the signature only if the function counts from there -----------

STORAGE = torch.arange(80.0).view(20, 4)


def as_many_ops_as_the_offset(x):
    for _ in range(x.storage_offset() % 3):
        x = x + 1
    return x


OFFSETS_FUNCTIONS = {
    "window": lambda x: x.as_strided((2, 2), (1, 1)) * 2,
    "window of a view": lambda x: torch.as_strided(x[1:], (2,), (2,)) * 2,
    "view": lambda x: x[1:] * 2,
    "unfold": lambda x: x.unfold(0, 2, 1) + 1,
    "of what it made": lambda x: (x * 2).as_strided((3,), (1,), 2) + (x * 3)[1:].storage_offset(),
    "as smaller elements": lambda x: x.view(torch.int8) + 1,
    # Those that depend on the offset.
    "offset": lambda x: x * x.storage_offset(),
    "offset of a view": lambda x: x * x[1:2].storage_offset() + x[:, 2:].storage_offset(),
    "as many ops as the offset": as_many_ops_as_the_offset,
    "window at": lambda x: x.as_strided((2,), (1,), 13) * 2,
    "window of a view at": lambda x: torch.as_strided(x[1:], (2,), (1,), storage_offset=13) * 2,
    "window by its op": lambda x: (
        aten.as_strided.default(x, (2,), (1,), 13) + aten.as_strided(x, (2,), (1,), 13)
    ),
    "window before": lambda x: x.as_strided((2,), (1,), 1) * 2,
    "window that is returned": lambda x: x.as_strided((2,), (1,), 13),
    "written window": lambda x: x.as_strided((2,), (1,), 13).mul_(2),
    "scattered": lambda x: torch.as_strided_scatter(x, torch.ones(2), (2,), (1,), 13),
}


def check(compiled, fn, start):
    """Asserts that the result, its place in the storage and the writes to the storage equal eager mode's."""
    ours, theirs = STORAGE.clone(), STORAGE.clone()
    found, expected = compiled(ours[start : start + 5]), fn(theirs[start : start + 5])
    torch.testing.assert_close(found, expected)
    assert torch.equal(ours, theirs)
    if expected.untyped_storage().nbytes() == STORAGE.untyped_storage().nbytes():
        assert (found.storage_offset(), found.stride()) == (expected.storage_offset(), expected.stride())


@pytest.mark.sweep(108)
@pytest.mark.parametrize("dynamic", [False, None, True])
@pytest.mark.parametrize("name", OFFSETS_FUNCTIONS)
@pytest.mark.parametrize("starts", [(0, 2, 3, 0), (2, 0, 3, 1)])
def test_tensors_that_begin_anywhere(name, dynamic, starts):
    if name == "offset of a view" and dynamic and starts[0] == 0:
        pytest.skip(
            "Dynamo takes the offset 0 of an argument as a constant without a guard, in stock as well"
        )
    compiled = by_pass(OFFSETS_FUNCTIONS[name], dynamic=dynamic)
    for start in starts:
        check(compiled, OFFSETS_FUNCTIONS[name], start)


@pytest.mark.sweep(60)
@pytest.mark.parametrize("name", OFFSETS_FUNCTIONS)
@pytest.mark.parametrize("door", BACKEND_DOORS)
def test_through_inductor(name, door):
    compiled = BACKEND_DOORS[door](OFFSETS_FUNCTIONS[name])
    for start in (2, 0, 3):
        check(compiled, OFFSETS_FUNCTIONS[name], start)


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("dynamic", [False, True])
def test_one_program_serves_every_place_where_none_matters(dynamic, start):
    compiled = by_pass(lambda x: x * 2, dynamic=dynamic)
    for row in (start, 3, 0, 5):
        check(compiled, lambda x: x * 2, row)
    assert len(compiled.programs) == 1 + (dynamic and start > 0)  # Dynamo makes a symbol of an offset above 1
    assert "storage_offset() " not in compiled.programs[0].wrapper


def test_what_is_inside_a_wrapper():
    compiled = by_pass(lambda x: x.unwrap()[0].as_strided((2,), (1,), 13) * 2)
    for start in (0, 2, 3):
        x = Pair(STORAGE[start : start + 5], STORAGE[:5])
        torch.testing.assert_close(compiled(x), torch.tensor([26.0, 28.0]))


@pytest.mark.parametrize("way", WAYS)
def test_a_view_as_larger_elements(way):
    """It takes an offset that they divide: elsewhere the call is refused as in eager mode."""
    storage = torch.arange(64, dtype=torch.int8)
    compiled = WAYS[way](lambda x: x.view(torch.int32) + 1, dynamic=False)
    for start in (0, 8, 4, 0):
        part = storage[start : start + 16]
        assert compiled(part).equal(part.view(torch.int32) + 1)
        with pytest.raises(RuntimeError, match=r"storage_offset\(\) must be divisible by 4"):
            compiled(storage[1:17])


# ---- fakes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("odd", "what"),
    [
        (torch.eye(2).to_sparse(), "sparse_coo"),
        (torch.ones(2, dtype=torch.complex64).conj(), "conjugated"),
        (torch.ones(2, dtype=torch.complex64).conj().imag, "conjugated or negated"),
    ],
    ids=["sparse", "conj", "neg"],
)
def test_what_is_not_strided_is_refused(odd, what):
    with pytest.raises(DesugarError, match=rf"{what}[\s\S]*convert it first"):
        check_plain(odd)
    torch.testing.assert_close(by_pass(lambda x: x * 2)(odd), odd * 2)
