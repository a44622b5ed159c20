"""``check``, ``examine`` and ``suite``: the promises of a level on one class, and the loop that tries them."""

from __future__ import annotations

import functools
import inspect
import unittest
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Unpack

from subclasses.errors import one_of
from subclasses.testing.calls import WHOLE, Case
from subclasses.testing.cases import names_of_rules
from subclasses.testing.errors import (
    Broken,
    Skipped,
    chain,
    problem,
    skip_unless,
    succeeds,
    tried,
)
from subclasses.testing.promises import PROMISES
from subclasses.testing.report import Failure, Outcome, Promise, Report
from subclasses.testing.subject import (
    LEVELS,
    Factory,
    Options,
    Subject,
    check_options,
    is_differentiable,
    once,
    undisturbed,
)


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
    only, least = options.get("only"), LEVELS.index(options.get("level", "gradients"))
    return [
        p for p in PROMISES if (p.name in {*only, "readable"} if only else LEVELS.index(p.level) <= least)
    ]


# ---- one class -----------------------------------------------------------------------------------------------


def examine(
    factory: Factory, *, tell: Callable[[str], None] | None = None, **options: Unpack[Options]
) -> Report:
    """Checks each promise of the level and returns the outcomes; see :func:`check`.

    ``tell`` is called before each promise with a line that names it, to show progress.
    """
    check_options(factory, options)
    promises, s = chosen(options), Subject(factory, options)
    outcomes = []
    for number, promise in enumerate(promises, 1):
        if tell is not None:
            tell(f"promise {number} of {len(promises)}: {promise.name}")
        outcomes.append(outcome_of(s, promise))
    return Report(s.name, tuple(outcomes), tuple(_warnings(s)), tuple(s.derived.items()))


# Methods by which a class may return the plain tensor that a value represents.
_PLAIN = ("dequantize", "to_dense", "to_plain", "to_tensor", "get_data", "full_tensor", "unwrap")


def _warnings(s: Subject) -> Iterator[str]:
    if not s.has_reference:
        calls = [
            f"{name}()"
            for name in _PLAIN
            if not (s.declared and name == "unwrap")  # it returns a tuple
            and inspect.isfunction(method := getattr(s.cls, name, None))
            and succeeds(inspect.signature(method).bind, None)
        ]
        fields = [
            f'unwrap("{field.name}")'
            for field, t in (s.inner_fields(s.make()) if s.declared else ())
            if is_differentiable(t) and t.shape == s.make().shape
        ]
        yield f"NO RESULT WAS COMPARED WITH PLAIN TENSORS: pass reference=, a function from {one_of(s.cls)} to the"
        such = f", such as reference=lambda x: x.{[*calls, *fields][0]}" if calls or len(fields) == 1 else ""
        yield f"  tensor that it represents{such}"
    if not s.traceable:
        yield f"NOTHING WAS COMPILED OR FLATTENED: {s.name} is not a traceable wrapper subclass; see `flatten`"


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
    subject = functools.cache(lambda: Subject(factory, options))
    tests = {f"test_{p.name}": lambda self, p=p: run_test(subject(), p) for p in chosen(options)}
    return type("ConformanceSuite", (), {"__doc__": "One test for each promise.", **tests})


# ---- the loop ------------------------------------------------------------------------------------------------


@undisturbed()
def outcome_of(s: Subject, promise: Promise) -> Outcome:
    """Checks each case of a promise in each setting, and gathers those that fail; clean refusals are noted.

    Where the class is known to take a call in eager mode, only a ``NotImplementedError`` refuses it elsewhere. The
    caller's random state stays as it is.
    """
    s.refused.clear()
    failures, skipped = list[Failure](), ""
    find = partial(_trials, s, promise)
    for case, words, run in tried(find)[0] or [(WHOLE, "", find)]:
        _, error = tried(run)
        if isinstance(error, Skipped):
            skipped = str(error)
        elif error is not None:
            if promise.tells:
                s.wrong_values.add(case.name)
            what, deliberate = case.name or promise.name, "works" not in case.marks
            if not (promise.may_refuse and s.refuses(what, error, deliberate=deliberate)):
                repeat = None if failures else run
                failures.append(_failure(s, promise, f"{case.name}{words}", error, repeat))
    more = f" (and {len(failures) - 3} more calls)" if len(failures) > 3 else ""
    return Outcome(
        promise,
        "broken" if failures else "skipped" if skipped else "kept",
        "; ".join(failure.text for failure in failures[:3]) + more or skipped,
        failures[0].hint if failures else "",
        tuple(dict.fromkeys(f"{call}: {message}" for call, message in s.refused)),
        tuple(failures),
    )


def _trials(s: Subject, promise: Promise) -> list[tuple[Case, str, Callable[[], None]]]:
    """Each case in each setting: the case, words for the setting, and the check."""
    skips = s.options.get("skip", ())
    skip_unless(promise.name not in skips, "left out by skip=")
    if promise.name != "readable" and "readable" not in skips and (unreadable := _unreadable(s)):
        raise Skipped(f"{unreadable} fails; see the promise `readable`")
    s.needs(*promise.needs)
    source = promise.cases
    cases = [*source(s)] if callable(source) else [Case(*item) for item in source.items()]
    left = [case for case in cases if not (promise.right and case.name in s.wrong_values)]
    skip_unless(left or not cases, "all of its calls give wrong values: see the promise `values`")
    settings = [(setting,) for setting in promise.context(s)] if promise.context and left else [()]
    return [
        (case, "".join(setting.words for setting in given), partial(promise.oracle, s, case, *given))
        for case in left
        for given in settings
    ]


@once
def _unreadable(s: Subject) -> str:
    """The first read of a value that fails, such as of its shape; empty if all reads work."""
    return next((failure.case for failure in outcome_of(s, PROMISES[0]).failures), "")


# ---- hints ---------------------------------------------------------------------------------------------------

# Codes of errors of this package, and faults that the kit sees, with the advice; {} is the error's own hint.
ADVICE = {
    "rule-result": "correct what that rule returns: {}",
    "rule-parameters": "correct the parameters of that rule: {}",
    "materialize-result": (
        "correct materialize(): it returns a plain tensor of the size, dtype and device that the value shows. Or "
        "declare the outer size and dtype with size_from=, dtype_from= or `outer`"
    ),
    "inner-size": (
        'fallback="map" runs each op on each inner tensor, and dims, indices and plain operands fit one size alone: '
        'use fallback="materialize" with a materialize() that returns the represented tensor, write rules for the '
        "ops, or hold the numbers in the value's size. If the class is a container, on which no such ops are "
        "called: skip= the promise"
    ),
    "field-of-operand": (
        "a rule is called when any operand is of the class, the right one too, beside numbers and plain tensors: it "
        "checks isinstance(operand, cls) before it reads a field, and computes with other operands or refuses them"
    ),
    "metadata-default": "a result has the metadata that the rule passes to the constructor, and the default of any "
    "other: pass each field on, as in type(x)(..., unit=x.unit)",
    "tensor-from-outside": (
        "a rule or materialize() uses a tensor that is neither an operand nor an inner tensor. A compiler traces "
        "with fake tensors and has none for it: declare it as a constant of the class, with constant(), or as a "
        "field, with inner()"
    ),
}
# PyTorch's message where a compiler's fake tensor meets a tensor with data that is not an argument.
_REAL_TENSOR = "Please convert all Tensors to FakeTensors"


def _failure(
    s: Subject, promise: Promise, call: str, error: Exception, run: Callable[[], Any] | None
) -> Failure:
    """The record of an error, with advice if ``run`` repeats the check."""
    codes = [(code, getattr(one, "hint", None) or "") for one in chain(error) if (code := _code_of(s, one))]
    code, own = next((pair for pair in codes if pair[0] in ADVICE), [*codes, ("", "")][0])
    got, expected = (error.got, error.expected) if isinstance(error, Broken) else (problem("", error), "")
    hint = _hint(s, promise, error, code, own, run) if run else ""
    return Failure(promise.name, call, got, expected, code, hint, problem(call, error), error)


def _code_of(s: Subject, error: Any) -> str:
    """The code of an error, or of the fault that it shows; empty if there is none."""
    if _REAL_TENSOR in str(error):
        return "tensor-from-outside"
    is_field = isinstance(error, AttributeError) and s.declared and error.name in s.cls.__spec__.names
    if is_field and not isinstance(error.obj, s.cls):
        return "field-of-operand"
    return error.fault if isinstance(error, Broken) else getattr(error, "code", None) or ""


def _hint(s: Subject, promise: Promise, error: Exception, code: str, own: str, run: Callable[[], Any]) -> str:
    """The advice for an error: by the check, by its code, or the promise's own, with the rules that ran, if few."""
    rules = names_of_rules(s, run) if s.declared else []
    named = f"look at {' and '.join(rules)}, which ran: " if 0 < len(rules) <= 3 else ""
    advice = "" if code == "no-rule" else ADVICE.get(code, "{}")
    advice = advice.replace("{}", own) if own or "{}" not in advice else ""
    usual = promise.declared if s.declared and promise.declared else promise.mend
    return getattr(error, "mend", None) or named + (advice or usual)
