"""``check``, ``examine`` and ``suite``: all promises on one class."""

from __future__ import annotations

import functools
import inspect
import unittest
from collections.abc import Callable, Iterator
from typing import Any, Unpack

import torch
from torch import Tensor

from subclasses.errors import one_of
from subclasses.rules.results import describe
from subclasses.spec.values import inner_tensors, with_inners
from subclasses.testing import op_infos
from subclasses.testing.cases import once
from subclasses.testing.errors import Attempt, Broken, OfBase, Skipped, refusal, shown, succeeds
from subclasses.testing.faults import mend_of
from subclasses.testing.properties import (
    compiled,
    copies,
    gradients,
    memory,
    nesting,
    pairs,
    rule_coverage,
    slopes,
    structure,
    surroundings,
    values,
    views,
)
from subclasses.testing.property import Outcome, Promise
from subclasses.testing.reach import name_rules
from subclasses.testing.report import Report
from subclasses.testing.subject import Factory, Options, Subject, undisturbed

_MODULES = (
    structure,
    values,
    pairs,
    surroundings,
    views,
    memory,
    copies,
    gradients,
    slopes,
    rule_coverage,
    compiled,
    nesting,
    op_infos,
)
# The order of the report.
PROMISES = [p for module in _MODULES for p in vars(module).values() if isinstance(p, Promise)]


class ConformanceError(AssertionError):
    """A class breaks promises; the message says which, how it shows and how to mend it."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.details())
        self.report = report


# ---- running -----------------------------------------------------------------------------------------------


def run_promise(s: Subject, promise: Promise) -> Outcome:
    """Checks one promise."""
    if promise.name in s.options.get("skip", ()):
        return Outcome(promise, "skipped", "left out by skip=")
    least = structure.readable
    with undisturbed():
        found = (
            None if promise is least or least.name in s.options.get("skip", ()) else structure.unreadable(s)
        )
    if found is not None:
        return Outcome(promise, "skipped", f"{found[0]} fails; see the promise `{least.name}`")
    s.refused.clear()
    with undisturbed(), Attempt() as attempt:
        promise.run(s)
    error, refused = attempt.error, tuple(dict.fromkeys(s.refused))
    match error:
        case None:
            return Outcome(promise, "kept", refused=refused)
        case Skipped():
            return Outcome(promise, "skipped", str(error), refused=refused)
        case Broken(mend=mend):
            if mend and isinstance(error.__cause__, OfBase):
                mend = name_rules(s, error) + mend
            mend = _of_materialize(s) or mend_of(error, s.cls, s.is_own) or mend or _of_mapped(s, promise)
            mend = mend or name_rules(s, error) + promise.mend_for(s)
            return Outcome(promise, "broken", str(error), mend, refused, error)
    message = refusal(error)
    if message is not None:
        return Outcome(promise, "kept", refused=(*refused, message))
    mend = _of_materialize(s) or mend_of(error, s.cls, s.is_own) or promise.mend_for(s)
    return Outcome(promise, "broken", shown(error), mend, refused, error)


@once
def _of_materialize(s: Subject) -> str:
    """The mend of a ``materialize`` that writes to a field, which can break any promise; else empty."""
    if not (s.declared and s.cls.__spec__.has_materialize):
        return ""
    x = s.make()
    before = {name: t.clone() for name, t in s.inners(x).items() if type(t) is Tensor}
    with undisturbed(), Attempt(), torch.no_grad():
        x.materialize()
    written = [name for name, t in before.items() if not torch.equal(s.inners(x)[name], t)]
    if not written:
        return ""
    return (
        f"{describe(s.cls.materialize)} writes to {' and '.join(written)}: let it compute into new tensors, not by "
        f"`add_`, `out=` or an index"
    )


def _of_mapped(s: Subject, promise: Promise) -> str:
    """The mend where ``reference=`` says something else of a mapped class than its plain cotangents mean."""
    if promise.name not in ("inner_gradients", "cotangents") or not (s.declared and s.has_reference):
        return ""
    if not s.cls._traits.is_mapped or s.cls._traits.pulls_back or _has_slopes_of_one(s):
        return ""
    return (
        'with fallback="map", a plain cotangent of a value goes to each of its inner tensors, whatever reference= '
        "makes of them: define wrap_cotangent(self, cotangent), which gives a value of the derivatives of reference= "
        "by the inner tensors, or leave reference= out"
    )


@torch.no_grad()
def _has_slopes_of_one(s: Subject) -> bool:
    """Whether ``reference=`` grows by one where any inner tensor does."""
    x = s.make()
    held = inner_tensors(x)
    (before, *more) = s.reference(x)
    for n, t in enumerate(held):
        if t is not None and t.is_floating_point():
            (after, *_) = s.reference(with_inners(x, [*held[:n], t + 1, *held[n + 1 :]]))
            if (
                more
                or after.shape != before.shape
                or not torch.allclose(after - before, torch.ones_like(before))
            ):
                return False
    return True


def examine(
    factory: Factory, *, tell: Callable[[str], None] | None = None, **options: Unpack[Options]
) -> Report:
    """Checks every promise and returns the outcomes; see :func:`check`.

    ``tell`` is called before each promise with a line that names it, to show progress.
    """
    s, outcomes = _subject(factory, options), []
    for number, promise in enumerate(PROMISES, 1):
        if tell is not None:
            tell(f"promise {number} of {len(PROMISES)}: {promise.name}")
        outcomes.append(run_promise(s, promise))
    return Report(s.name, tuple(outcomes), tuple(_warnings(s)), tuple(s.derived.items()))


# Methods by which a class may say what plain tensor its values stand for.
_PLAIN = ("dequantize", "to_dense", "to_plain", "to_tensor", "get_data", "full_tensor", "unwrap")


def _warnings(s: Subject) -> Iterator[str]:
    if not s.has_reference:
        named = next((name for name in _PLAIN if _is_getter(s, name)), None)
        yield (
            f"NO RESULT WAS COMPARED WITH PLAIN TENSORS: pass reference=, a function from {one_of(s.cls)} to the"
        )
        yield f"  tensor that it stands for{f', such as reference=lambda x: x.{named}()' if named else ''}"
    if not s.traceable:
        yield f"NOTHING WAS COMPILED OR TAKEN APART: {s.name} is not a traceable wrapper subclass; see `flatten`"


def _is_getter(s: Subject, name: str) -> bool:
    """Whether the class defines a method that takes no argument."""
    method = next((vars(b)[name] for b in s.own_bases if name in vars(b)), None)
    return inspect.isfunction(method) and succeeds(inspect.signature(method).bind, None)


def check(factory: Factory, **options: Unpack[Options]) -> Report:
    """Puts a tensor subclass, declared or written by hand, to the test.

    The values are made by ``factory``, which may draw random numbers: a seed is set before each call. By default
    nothing is compiled with Inductor. What the class refuses cleanly breaks no promise: with a
    ``NotImplementedError``, or, where it does not work in eager mode either, with a ``TypeError``, ``ValueError``
    or ``RuntimeError`` that a ``raise`` statement in the class's own package raises. Compiled programs of the
    process are dropped on the way.

    Args:
        factory: takes nothing and gives a value of the class: two-dimensional, if it is to meet all the ops.
        **options: see :class:`Options`.

    Returns:
        The outcome of each promise.

    Raises:
        ConformanceError: the class breaks a promise.
        TypeError: the factory gives no tensor subclass, or an option is unknown.
    """
    report = examine(factory, **options)
    if report.broken:
        raise ConformanceError(report)
    return report


def _subject(factory: Factory, options: Options) -> Subject:
    names = [p.name for p in PROMISES]
    unknown = set(options.get("skip", ())).difference(names)
    if unknown:
        raise TypeError(
            f"skip= has unknown promises {', '.join(sorted(unknown))}; they are {', '.join(names)}"
        )
    with undisturbed():
        return Subject(factory, options)


# ---- as a test class ---------------------------------------------------------------------------------------


def suite(factory: Factory, **options: Unpack[Options]) -> type:
    """A class with one test for each promise, which pytest collects; see :func:`check` for the arguments.

    ::

        TestMine = suite(make_mine)
    """
    subject = functools.cache(lambda: _subject(factory, options))

    def test_of(promise: Promise) -> Any:
        def test(self: Any) -> None:
            outcome = run_promise(subject(), promise)
            if outcome.state == "skipped":
                raise unittest.SkipTest(outcome.detail)
            if outcome.state == "broken":
                raise ConformanceError(Report(subject().name, (outcome,))) from outcome.error

        test.__name__ = test.__qualname__ = f"test_{promise.name}"
        test.__doc__ = promise.says
        return test

    body = {f"test_{p.name}": test_of(p) for p in PROMISES}
    return type("ConformanceSuite", (), {"__doc__": "One test for each promise.", **body})
