"""Rules that take the metadata of an operand for granted: found with the factories of ``variants=``."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from subclasses import TensorSubclass, dynamic, inner, static
from subclasses.testing import examine
from subclasses.testing.runner import PROMISES

aten = torch.ops.aten


class Length(TensorSubclass, fallback="materialize"):
    """Numbers of a unit of so many metres."""

    number: Tensor = inner()
    unit: float = static(default=1.0)
    digits: int = dynamic(default=3)

    def materialize(self):
        return self.number * self.unit


def with_rule(key, rule):
    cls = type("Ruled", (Length,), {"__doc__": "One more rule."})
    cls.implements(key)(rule)
    return cls


def outcome(cls, promise, **options):
    others = {p.name for p in PROMISES} - {promise}
    options.setdefault("variants", [functools.partial(make, cls, unit=1000.0)])
    report = examine(functools.partial(make, cls), paths={}, skip=others, **options)
    return next(o for o in report.outcomes if o.promise.name == promise)


def make(cls, **metadata):
    return cls(torch.randn(4, 6), **metadata)


def without_unit(func, x):
    return type(x)(func(x.number))


def with_unit(func, x):
    return type(x)(func(x.number), unit=x.unit)


def adding_numbers(func, x, y, alpha=1):
    if not (isinstance(x, Length) and isinstance(y, Length)):
        return NotImplemented
    return type(x)(x.number + alpha * y.number, unit=x.unit)


def converting(func, x, y, alpha=1):
    if not (isinstance(x, Length) and isinstance(y, Length)):
        return NotImplemented
    return type(x)(x.number + alpha * y.number * (y.unit / x.unit), unit=x.unit)


def refusing(func, x, y, alpha=1):
    if not (isinstance(x, Length) and isinstance(y, Length)) or x.unit != y.unit:
        raise ValueError("lengths of one unit can be added")
    return adding_numbers(func, x, y, alpha)


def joining_numbers(func, tensors, dim=0):
    return type(tensors[0])(func([t.number for t in tensors], dim), unit=tensors[0].unit)


def joining(func, tensors, dim=0):
    unit = tensors[0].unit
    return type(tensors[0])(func([t.number * (t.unit / unit) for t in tensors], dim), unit=unit)


# The promise, what the rule is for, the wrong rule, right ones, words of the report.
FAULTS = {
    "a unit forgotten": (
        "other_metadata",
        aten.abs.default,
        without_unit,
        [with_unit],
        ["x.abs() with unit=1000.0 is not what its reference gives", "none of which it may take for granted"],
    ),
    "numbers of two units added": (
        "mixed_metadata",
        aten.add.Tensor,
        adding_numbers,
        [converting, refusing],
        ["x + y, y with unit=1000.0 is not what", "convert one of them where they differ, or refuse the op"],
    ),
    "numbers of two units joined": (
        "mixed_metadata",
        aten.cat.default,
        joining_numbers,
        [joining],
        ["torch.cat([x, y]), y with unit=1000.0"],
    ),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_metadata_taken_for_granted_is_found(fault):
    promise, key, wrong, right, words = FAULTS[fault]
    found = outcome(with_rule(key, wrong), promise)
    assert found.state == "broken"
    assert all(word in str(found) for word in words), str(found)
    for rule in right:
        assert outcome(with_rule(key, rule), promise).state == "kept"


def test_without_variants_nothing_is_tried():
    found = outcome(with_rule(aten.abs.default, without_unit), "other_metadata", variants=[])
    assert found.state == "skipped" and "pass variants=" in found.detail


class Signed(Length):
    negative: bool = static(default=False)

    def materialize(self):
        return -super().materialize() if self.negative else super().materialize()


@pytest.mark.slow
def test_a_variant_that_is_not_right_is_named_where_it_is_not_taken():
    """It may be that its metadata do not fit the inner tensors, or that a rule is wrong."""
    cls = type("Ruled", (Signed,), {"__doc__": "One more rule."})
    cls.implements(aten.abs.default)(
        lambda func, x: type(x)(func(x.number), unit=x.unit, negative=x.negative)
    )
    found = outcome(cls, "other_metadata", variants=[])
    assert found.state == "skipped"
    assert "negative=True was not tried: x.abs() is not what its reference gives" in found.detail


class Timed(TensorSubclass, fallback="map"):
    t: Tensor = inner()
    v: Tensor = inner()


@pytest.mark.slow
def test_a_field_that_hides_a_method_is_no_fault_of_the_class():
    report = examine(lambda: Timed(torch.randn(4, 6), torch.randn(4, 6)), paths={})
    assert report.broken == [], report.details()


@pytest.mark.slow
def test_a_default_in_place_of_an_operands_metadata_is_found_where_the_reference_does_not_tell():
    cls = type("Ruled", (Length,), {"__doc__": "One more rule."})
    cls.implements(aten.abs.default)(without_unit)
    found, right = (
        outcome(
            c,
            "kept_metadata",
            reference=lambda x: x.number,
            variants=[functools.partial(make, c, unit=1000.0, digits=5)],
        )
        for c in (cls, Length)
    )
    assert found.state == "broken" and right.state == "kept"
    assert "x.abs() has the default unit=1.0, not 1000.0, digits=3, not 5" in found.detail
    assert "pass each field on" in found.mend


class Cached(Length):
    def materialize(self):
        if "whole" not in self.__dict__:
            self.__dict__["whole"] = super().materialize()
        return self.__dict__["whole"]


@pytest.mark.slow
def test_what_materialize_keeps_is_found():
    found = outcome(Cached, "fresh_values")
    assert found.state == "broken" and "stale after a step of an optimizer" in found.mend
    assert outcome(Length, "fresh_values").state == "kept"


class Labels(TensorSubclass, fallback="materialize", dtype_from="like"):
    """No inner tensor that an optimizer would step is used."""

    labels: Tensor = inner(dtype=torch.int64)
    like: Tensor = inner()

    def materialize(self):
        return self.labels.to(self.dtype)


class KeepsOnValue(Labels):
    def materialize(self):
        if "whole" not in self.__dict__:
            self.__dict__["whole"] = super().materialize()
        return self.__dict__["whole"]


class CachedProperty(Labels):
    @functools.cached_property
    def whole(self):
        return self.labels.to(self.dtype)

    def materialize(self):
        return self.whole.clone()


class CachedMethod(Labels):
    @functools.lru_cache  # noqa: B019
    def whole(self):
        return self.labels.to(self.dtype)

    def materialize(self):
        return self.whole().clone()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("cls", [KeepsOnValue, CachedProperty, CachedMethod])
def test_what_is_kept_of_integers_is_found(cls):
    def found(cls):
        factory = lambda: cls(torch.randint(9, (4, 6)), torch.zeros(4, 6))  # noqa: E731
        others = {p.name for p in PROMISES} - {"fresh_values"}
        (outcome,) = (
            o for o in examine(factory, paths={}, skip=others).outcomes if o.promise.name not in others
        )
        return outcome

    wrong = found(cls)
    assert wrong.state == "broken" and "x.materialize() after a copy_ to each inner tensor" in wrong.detail
    assert "cached_property or lru_cache" in wrong.mend
    assert found(Labels).state == "kept"


class KeepsUntilWritten(Labels):
    """Looks at the version of its labels, which an assignment replaces by others."""

    def materialize(self):
        kept = self.__dict__.get("kept", (None, None))
        if kept[0] != self.labels._version:
            kept = self.__dict__["kept"] = self.labels._version, super().materialize()
        return kept[1].clone()


@pytest.mark.slow
def test_what_is_kept_over_an_assignment_is_found():
    factory = lambda: KeepsUntilWritten(torch.randint(9, (4, 6)), torch.zeros(4, 6))  # noqa: E731
    others = {p.name for p in PROMISES} - {"fresh_values"}
    (found,) = examine(factory, paths={}, skip=others).of("broken")
    assert "x.materialize() after an assignment of each field" in found.detail
