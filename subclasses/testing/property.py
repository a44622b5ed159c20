"""Properties, called promises in reports: each is a function of the class under test, or of one case on it.

:func:`promise` makes a property of such a function. :func:`run_cases` is the one loop over cases.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from subclasses.testing.errors import Attempt, Broken, Skipped, first_three, problem

if TYPE_CHECKING:
    from subclasses.testing.subject import Subject


@dataclass(frozen=True)
class Case:
    """A call by the name that a report shows; ``works`` if the class is known to take it in eager mode."""

    name: str
    run: Callable[[Any], Any]
    works: bool = False


@dataclass(frozen=True)
class Promise:
    """One promise.

    Attributes:
        name: the name of its function.
        says: the promise in a sentence, the first line of the function's docstring.
        mend: advice for a class that breaks it.
        check: ``check(subject)``, or ``check(subject, case)`` if there are cases.
        cases: makes the cases for a class.
        declared: advice for a declared class, where that of a class written by hand does not fit.
        of_right_values: whether it looks at results whose values are right: its advice is for something else than
            calls that give other numbers.
    """

    name: str
    says: str
    mend: str
    check: Callable[..., None]
    cases: Callable[[Subject], Iterable[Case]] | None = None
    declared: str = ""
    of_right_values: bool = False

    def mend_for(self, s: Subject) -> str:
        """Returns the advice for a class."""
        return self.declared if s.declared and self.declared else self.mend

    def run(self, s: Subject) -> None:
        """Checks a class."""
        if self.cases is None:
            return self.check(s)
        cases = list(self.cases(s))
        if self.of_right_values:
            left = [case for case in cases if case.name not in s.wrong_values]
            if cases and not left:
                raise Skipped("all of its calls give wrong values: see the promise `values`")
            cases = left
        return run_cases(s, cases, self.check)


def promise(
    mend: str,
    cases: Callable[[Subject], Iterable[Case]] | None = None,
    declared: str = "",
    of_right_values: bool = False,
) -> Callable[[Callable[..., None]], Promise]:
    """Makes a :class:`Promise` of the decorated function."""
    return lambda check: Promise(
        check.__name__, (check.__doc__ or "").splitlines()[0], mend, check, cases, declared, of_right_values
    )


def run_cases(s: Subject, cases: Iterable[Case], check: Callable[[Subject, Case], None]) -> None:
    """Checks each case, and raises one error for all cases that fail; clean refusals are noted.

    Where the class is known to take a call in eager mode, only a ``NotImplementedError`` refuses it elsewhere.
    """
    problems: list[tuple[str, Exception, Case]] = []
    skipped = None
    for case in cases:
        with Attempt() as attempt:
            check(s, case)
        error = attempt.error
        if isinstance(error, Skipped):
            skipped = error
        elif error is not None and not s.refuses(case.name, error, deliberate=not case.works):
            problems.append((problem(case.name, error), error, case))
    if problems:
        texts, errors, broken = zip(*problems, strict=True)
        again = functools.partial(check, s, broken[0])
        raise Broken(first_three(texts, "calls"), getattr(errors[0], "mend", None), again) from errors[0]
    if skipped is not None:
        raise skipped


# ---- outcomes ----------------------------------------------------------------------------------------------

State = Literal["kept", "broken", "skipped"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one promise.

    Attributes:
        promise: which.
        state: kept, broken, or skipped where it could not be checked.
        detail: what broke it, or why it was skipped.
        mend: how to mend it, if broken.
        refused: what the class refused cleanly, with the first line of each message.
        error: the exception behind a broken promise.
    """

    promise: Promise
    state: State
    detail: str = ""
    mend: str = ""
    refused: tuple[str, ...] = ()
    error: BaseException | None = field(default=None, compare=False)

    def __str__(self) -> str:
        head = f"{self.promise.name}: {self.promise.says}"
        if self.state == "broken":
            return f"{head}\n  broken: {self.detail}\n  mend: {self.mend}"
        return f"{head}\n  {self.state}{f': {self.detail}' if self.detail else ''}"
