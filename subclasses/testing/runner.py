"""``check``, ``examine`` and ``suite``: the promises of a level on one class."""

from __future__ import annotations

import functools
import inspect
import unittest
from collections.abc import Callable, Iterator
from typing import Any, Unpack

from subclasses.errors import one_of
from subclasses.testing.errors import succeeds
from subclasses.testing.promises import PROMISES
from subclasses.testing.property import Outcome, Promise, run_promise
from subclasses.testing.report import Report
from subclasses.testing.structure import unreadable
from subclasses.testing.subject import Factory, Options, Subject, check_options, undisturbed

_LEVELS = ("smoke", "gradients", "full")


class ConformanceError(AssertionError):
    """A class breaks promises; the message names them, shows the differences and gives advice."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.details())
        self.report = report


def chosen(options: Options) -> list[Promise]:
    """The promises of the level, or the promises that ``only=`` names.

    Raises:
        TypeError: ``skip=`` or ``only=`` has a name that no promise has.
    """
    names = [p.name for p in PROMISES]
    for option in ("skip", "only"):
        if unknown := set(options.get(option, ())).difference(names):
            raise TypeError(
                f"{option}= has unknown promises {', '.join(sorted(unknown))}; they are {', '.join(names)}"
            )
    if only := options.get("only"):
        return [p for p in PROMISES if p.name in {*only, "readable"}]
    levels = _LEVELS[: _LEVELS.index(options.get("level", "gradients")) + 1]
    return [p for p in PROMISES if p.level in levels]


def outcome_of(s: Subject, promise: Promise) -> Outcome:
    """The outcome of one promise, without a trace in the caller's random state."""
    skips = s.options.get("skip", ())
    if promise.name in skips:
        return Outcome(promise, "skipped", "left out by skip=")
    with undisturbed():
        if promise.name != "readable" and "readable" not in skips and (found := unreadable(s)):
            return Outcome(promise, "skipped", f"{found[0]} fails; see the promise `readable`")
        return run_promise(s, promise)


def examine(
    factory: Factory, *, tell: Callable[[str], None] | None = None, **options: Unpack[Options]
) -> Report:
    """Checks each promise of the level and returns the outcomes; see :func:`check`.

    ``tell`` is called before each promise with a line that names it, to show progress.
    """
    check_options(factory, options)
    promises, outcomes = chosen(options), []
    with undisturbed():
        s = Subject(factory, options)
    for number, promise in enumerate(promises, 1):
        if tell is not None:
            tell(f"promise {number} of {len(promises)}: {promise.name}")
        outcomes.append(outcome_of(s, promise))
    return Report(s.name, tuple(outcomes), tuple(_warnings(s)), tuple(s.derived.items()))


# Methods by which a class may return the plain tensor that a value represents.
_PLAIN = ("dequantize", "to_dense", "to_plain", "to_tensor", "get_data", "full_tensor", "unwrap")


def _warnings(s: Subject) -> Iterator[str]:
    if not s.has_reference:
        methods = {
            n: m for base in reversed(s.own_bases) for n, m in vars(base).items() if inspect.isfunction(m)
        }
        named = (n for n in _PLAIN if n in methods and succeeds(inspect.signature(methods[n]).bind, None))
        such = "".join(f", such as reference=lambda x: x.{name}()" for name in [*named][:1])
        yield (
            f"NO RESULT WAS COMPARED WITH PLAIN TENSORS: pass reference=, a function from {one_of(s.cls)} to the"
        )
        yield f"  tensor that it stands for{such}"
    if not s.traceable:
        yield f"NOTHING WAS COMPILED OR TAKEN APART: {s.name} is not a traceable wrapper subclass; see `flatten`"


def check(factory: Factory, **options: Unpack[Options]) -> Report:
    """Puts a tensor subclass, declared or written by hand, to the test.

    The values are made by ``factory``, which may draw random numbers: a seed is set before each call. By default
    nothing is compiled with Inductor. A clean refusal by the class breaks no promise. A ``NotImplementedError`` is a
    clean refusal. Where a call does not work in eager mode either, a ``TypeError``, ``ValueError`` or
    ``RuntimeError`` is one too. A ``raise`` statement in the class's own package must raise it. Compiled programs of
    the process are dropped on the way.

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


def run_test(s: Subject, promise: Promise) -> None:
    """Checks a promise as a test: raises ``ConformanceError`` if it is broken, ``SkipTest`` if it was skipped."""
    outcome = outcome_of(s, promise)
    if outcome.state == "skipped":
        raise unittest.SkipTest(outcome.detail)
    if outcome.state == "broken":
        raise ConformanceError(Report(s.name, (outcome,))) from outcome.error


def suite(factory: Factory, **options: Unpack[Options]) -> type:
    """A class with one test for each promise of the level, which pytest collects; see :func:`check` for the arguments.

    ::

        TestMine = suite(make_mine)
    """
    check_options(factory, options)

    @functools.cache
    def subject() -> Subject:
        with undisturbed():
            return Subject(factory, options)

    def test_of(promise: Promise) -> Any:
        def test(self: Any) -> None:
            run_test(subject(), promise)

        test.__name__ = test.__qualname__ = f"test_{promise.name}"
        test.__doc__ = promise.says
        return test

    body = {f"test_{p.name}": test_of(p) for p in chosen(options)}
    return type("ConformanceSuite", (), {"__doc__": "One test for each promise.", **body})
