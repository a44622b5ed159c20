"""Planted faults: classes with rules, and the kit's reports about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from subclasses import TensorSubclass
from subclasses.testing import examine
from subclasses.testing.promises import PROMISES
from subclasses.testing.report import Outcome
from tests.subclasses.subjects import declare

Factory = Callable[[], Any]


def plain(t: Any) -> Any:
    """Returns the plain tensor for which an operand stands."""
    return t.materialize() if isinstance(t, TensorSubclass) else t


def ruled(base: type, rules: Mapping[Any, Callable[..., Any]], **keywords: Any) -> Any:
    """Returns a class that inherits from another, and has rules of its own."""
    return declare(base, name="Ruled", rules=rules, keywords=keywords)


def only(*promises: str) -> set[str]:
    """Returns the promises to skip, so that only some are tried."""
    return {p.name for p in PROMISES} - {*promises, "readable"}


def outcomes(make: Factory, *promises: str, **options: Any) -> dict[str, Outcome]:
    """Returns the outcomes of some promises by name; nothing is compiled, unless `paths` says otherwise."""
    report = examine(make, **{"paths": {}, "skip": only(*promises)} | options)
    return {o.promise.name: o for o in report.outcomes}


def outcome(make: Factory, promise: str, **options: Any) -> Outcome:
    return outcomes(make, promise, **options)[promise]


def check_found(make: Factory, promise: str, words: list[str], **options: Any) -> None:
    """Checks that a promise is broken, and that the outcome holds some words."""
    found = outcome(make, promise, **options)
    assert found.state == "broken", found
    assert all(word in str(found) for word in words), str(found)


def check_kept(make: Factory, *promises: str, **options: Any) -> None:
    found = outcomes(make, *promises, **options)
    assert all(found[promise].state == "kept" for promise in promises), found


def finding(cases: Mapping[str, tuple[Any, ...]]) -> Any:
    """A test of ``(promise, wrong, words, right, options)``, where the two factories and the options may be missing.

    Values of a wrong factory break the promise, and the report has the words. Values of a right one keep it.
    """

    @pytest.mark.parametrize("case", cases)
    def test(case):
        promise, wrong, words, right, *options = (*cases[case], None)[: max(4, len(cases[case]))]
        if wrong is not None:
            check_found(wrong, promise, words, **dict(*options))
        if right is not None:
            check_kept(right, promise, **dict(*options))

    return test


def reporting(cases: Mapping[str, tuple[Factory, Mapping[str, Any], set[str], list[str]]]) -> Any:
    """A test of ``(factory, options, broken, words)``: the promises that are broken, and words of the whole report."""

    @pytest.mark.parametrize("case", cases)
    def test(case):
        make, options, broken, words = cases[case]
        report = examine(make, **{"paths": {}} | options)
        assert {*report.broken} == broken, report.details()
        assert all(word in str(report) for word in words), str(report)

    return test


def of_tensors(cls: Any, *sizes: tuple[int, ...]) -> Factory:
    """Returns a factory of values with random inner tensors, of one size twice unless told otherwise."""
    return lambda: cls(*(torch.randn(size) for size in sizes or ((4, 6), (4, 6))))
