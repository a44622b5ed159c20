"""Rules that take the metadata of an operand for granted: found with the factories of ``variants=``."""

from __future__ import annotations

import functools

import pytest
import torch

from subclasses import dynamic, inner, static
from tests.subclasses.subjects import declare
from tests.subclasses.testing.faults import check_found, check_kept, finding, outcome, ruled

aten = torch.ops.aten


Length = declare(
    name="Length",
    number=inner(),
    unit=static(default=1.0),
    digits=dynamic(default=3),
    annotations={"unit": float},
    materialize=lambda self: self.number * self.unit,
    keywords={"fallback": "materialize"},
)


def make(cls, **metadata):
    return cls(torch.randn(4, 6), **metadata)


def variants_of(cls, **metadata):
    return [functools.partial(make, cls, **(metadata or {"unit": 1000.0}))]


def without_unit(func, x):
    return type(x)(func(x.number))


def adding(converts, refuses=False):
    def add(func, x, y, alpha=1):
        if not (isinstance(x, Length) and isinstance(y, Length)):
            return NotImplemented
        if refuses and x.unit != y.unit:
            raise ValueError("lengths of one unit can be added")
        return type(x)(x.number + alpha * y.number * (y.unit / x.unit if converts else 1), unit=x.unit)

    return add


def joining(converts):
    def join(func, tensors, dim=0):
        unit = tensors[0].unit
        numbers = [t.number * (t.unit / unit if converts else 1) for t in tensors]
        return type(tensors[0])(func(numbers, dim), unit=unit)

    return join


# The promise, what the rule is for, the wrong rule, right ones, words of the report.
FAULTS = {
    "a unit forgotten": (
        "other_metadata",
        aten.abs.default,
        without_unit,
        [lambda func, x: type(x)(func(x.number), unit=x.unit)],
        ["x.abs() with unit=1000.0 is not what its reference gives", "none of which it may take for granted"],
    ),
    "numbers of two units added": (
        "mixed_metadata",
        aten.add.Tensor,
        adding(converts=False),
        [adding(converts=True), adding(converts=False, refuses=True)],
        ["x + y, y with unit=1000.0 is not what", "convert one of them where they differ, or refuse the op"],
    ),
    "numbers of two units joined": (
        "mixed_metadata",
        aten.cat.default,
        joining(converts=False),
        [joining(converts=True)],
        ["torch.cat([x, y]), y with unit=1000.0"],
    ),
}


def of_length(key=None, rule=None, base=Length):
    cls = ruled(base, {} if rule is None else {key: rule})
    return functools.partial(make, cls)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_metadata_taken_for_granted_is_found(fault):
    promise, key, wrong, right, words = FAULTS[fault]
    cls = ruled(Length, {key: wrong})
    check_found(functools.partial(make, cls), promise, words, variants=variants_of(cls))
    for rule in right:
        cls = ruled(Length, {key: rule})
        check_kept(functools.partial(make, cls), promise, variants=variants_of(cls))


def test_without_variants_nothing_is_tried():
    found = outcome(of_length(aten.abs.default, without_unit), "other_metadata", variants=[])
    assert found.state == "skipped" and "pass variants=" in found.detail


Signed = declare(
    Length,
    negative=static(default=False),
    annotations={"negative": bool},
    materialize=lambda self: Length.materialize(self) * (-1 if self.negative else 1),
)


@pytest.mark.slow
def test_a_rule_that_is_wrong_for_a_derived_variant_is_found():
    rule = lambda func, x: type(x)(func(x.number), unit=x.unit, negative=x.negative)  # noqa: E731
    words = ["x.abs() with negative=True is not what its reference gives"]
    check_found(of_length(aten.abs.default, rule, Signed), "other_metadata", words, variants=[])


@pytest.mark.slow
def test_a_default_in_place_of_an_operands_metadata_is_found_where_the_reference_does_not_tell():
    def options(cls):
        return {"reference": lambda x: x.number, "variants": variants_of(cls, unit=1000.0, digits=5)}

    cls = ruled(Length, {aten.abs.default: without_unit})
    words = ["x.abs() has the default unit=1.0, not 1000.0, digits=3, not 5", "pass each field on"]
    check_found(functools.partial(make, cls), "kept_metadata", words, **options(cls))
    check_kept(functools.partial(make, Length), "kept_metadata", **options(Length))


# ---- what materialize() keeps ----------------------------------------------------------------------------------


def kept_on_value(self):
    if "whole" not in self.__dict__:
        self.__dict__["whole"] = Length.materialize(self)
    return self.__dict__["whole"]


Cached = declare(Length, materialize=kept_on_value)


Labels = declare(
    labels=inner(dtype=torch.int64),
    like=inner(),
    whole=lambda self: self.labels.to(self.dtype),
    materialize=lambda self: self.whole().clone(),
    keywords={"fallback": "materialize", "dtype_from": "like"},
)


def until_written(self):
    """Looks at the version of its labels, which an assignment replaces by others."""
    kept = self.__dict__.get("kept", (None, None))
    if kept[0] != self.labels._version:
        kept = self.__dict__["kept"] = self.labels._version, Labels.materialize(self)
    return kept[1].clone()


class CachedProperty(Labels):
    @functools.cached_property
    def kept(self):
        return self.whole()

    def materialize(self):
        return self.kept.clone()


COPY = ["x.materialize() after a copy_ to each inner tensor", "cached_property or lru_cache"]
KEPT = {
    declare(
        Labels, name="Kept", materialize=lambda self: self.__dict__.setdefault("kept", self.whole())
    ): COPY,
    CachedProperty: COPY,
    declare(Labels, name="CachedMethod", whole=functools.lru_cache(Labels.whole)): COPY,
    declare(Labels, name="UntilWritten", materialize=until_written): [
        "x.materialize() after an assignment of each field"
    ],
}


test_what_materialize_keeps_is_found = pytest.mark.slow(
    finding(
        {
            "of numbers": (
                "fresh_values",
                functools.partial(make, Cached),
                ["stale after a step of an optimizer"],
                functools.partial(make, Length),
            )
        }
    )
)


def labels(cls):
    return lambda: cls(torch.randint(9, (4, 6)), torch.zeros(4, 6))


test_what_is_kept_of_integers_is_found = pytest.mark.sweep(3)(
    finding(
        {cls.__name__: ("fresh_values", labels(cls), words, labels(Labels)) for cls, words in KEPT.items()}
    )
)
