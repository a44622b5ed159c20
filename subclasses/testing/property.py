"""A promise as a row of the table, its failures as records, and the loop over cases, contexts and oracles."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from subclasses.testing.errors import Attempt, Broken, Skipped, chain, code_of, first_three, problem
from subclasses.testing.reach import WHOLE, Case, names_of_rules
from subclasses.testing.subject import Level, Subject

State = Literal["kept", "broken", "skipped"]


@dataclass(frozen=True)
class Promise:
    """One promise: a row of the kit's table.

    Attributes:
        name: the name by which ``skip=`` and ``only=`` take it.
        says: the promise in a sentence.
        check: ``check(subject, case)``: runs a case in its contexts, and raises where an oracle finds a difference.
        cases: makes the cases for a class; by default the class as a whole is the one case.
        mend: advice for a class that breaks it.
        declared: advice for a declared class, where that one fits only a class written by hand.
        level: the least level at which it is tried.
        may_refuse: whether a class may refuse its cases.
    """

    name: str
    says: str
    check: Callable[[Subject, Case], None]
    cases: Callable[[Subject], Iterable[Case]] = lambda s: [WHOLE]
    mend: str = ""
    declared: str = ""
    level: Level = "smoke"
    may_refuse: bool = True


@dataclass(frozen=True)
class Failure:
    """One case that failed.

    Attributes:
        promise: the name of the promise.
        case: the call, with its context; empty for a promise about the class as a whole.
        got: the result, or the error.
        expected: the result that was expected, where one was.
        code: the code of the error, if it is one of this package.
        hint: how to correct it, for the first failure of a promise.
        text: all of it in a sentence.
    """

    promise: str
    case: str
    got: str
    expected: str
    code: str
    hint: str
    text: str
    error: BaseException | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one promise.

    Attributes:
        promise: the promise.
        state: kept, broken, or skipped where it could not be checked.
        detail: the reason why it is broken or was skipped.
        mend: how to correct it, if broken.
        refused: the calls that the class refused cleanly, each with the first line of its message.
        failures: a record of each case that failed.
    """

    promise: Promise
    state: State
    detail: str = ""
    mend: str = ""
    refused: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = ()

    @property
    def error(self) -> BaseException | None:
        """The exception behind a broken promise."""
        return self.failures[0].error if self.failures else None

    def __str__(self) -> str:
        head = f"{self.promise.name}: {self.promise.says}"
        if self.state == "broken":
            return f"{head}\n  broken: {self.detail}\n  mend: {self.mend}"
        return f"{head}\n  {self.state}{f': {self.detail}' if self.detail else ''}"


# ---- the loop ----------------------------------------------------------------------------------------------


def run_promise(s: Subject, promise: Promise) -> Outcome:
    """Checks each case of a promise, and gathers those that fail; clean refusals are noted.

    Where the class is known to take a call in eager mode, only a ``NotImplementedError`` refuses it elsewhere.
    """
    s.refused.clear()
    failures: list[Failure] = []
    skipped = ""
    cases: list[Case] = []
    with Attempt() as attempt:
        cases += promise.cases(s)
    found = (
        [(WHOLE, attempt.error)] if attempt.error else [(case, _error_of(s, promise, case)) for case in cases]
    )
    for case, error in found:
        if isinstance(error, Skipped):
            skipped = str(error)
        elif error is not None and not (
            promise.may_refuse and s.refuses(case.name or promise.name, error, deliberate=not case.works)
        ):
            failures.append(_record(s, promise, case, error, explains=not failures))
    refused = tuple(dict.fromkeys(f"{call}: {message}" for call, message in s.refused))
    if failures:
        detail = first_three([failure.text for failure in failures], "calls")
        return Outcome(promise, "broken", detail, failures[0].hint, refused, tuple(failures))
    return Outcome(promise, "skipped" if skipped else "kept", skipped, "", refused)


def _error_of(s: Subject, promise: Promise, case: Case) -> Exception | None:
    with Attempt() as attempt:
        promise.check(s, case)
    return attempt.error


# The codes of errors of this package that tell a fault of the class, with the advice; {} is the error's own hint.
ADVICE = {
    "rule-result": "correct what that rule returns: {}",
    "rule-parameters": "correct the parameters of that rule: {}",
    "materialize-result": "correct materialize(): it returns a plain tensor of the size, dtype and device that the "
    "value shows; or say with size_from=, dtype_from= or `outer` what the value shows",
    "inner-size": 'fallback="map" runs each op on each inner tensor, and dims, indices and plain operands fit one size '
    'alone: use fallback="materialize" with a materialize() that says what the value is, write rules for the ops, or '
    "hold the numbers in the size of the value. If the class is a container, on which no such ops are called: skip= "
    "the promise",
    "tensor-from-outside": "a rule or materialize() uses a tensor that is neither an operand nor an inner tensor. A "
    "compiler traces with stand-ins and has none for it: declare it as a constant of the class, with constant(), or as "
    "a field, with inner()",
}
# PyTorch's message where a compiler's stand-in meets a tensor with data that is no argument.
_REAL_TENSOR = "Please convert all Tensors to FakeTensors"


def _record(s: Subject, promise: Promise, case: Case, error: Exception, *, explains: bool) -> Failure:
    text = problem(case.name, error)
    got, expected = (error.got, error.expected) if isinstance(error, Broken) else (problem("", error), "")
    codes = [code for one in chain(error) if (code := _code_of(one))]
    code = next((code for code in codes if code in ADVICE), codes[0] if codes else "")
    hint = _hint(s, promise, case, error, code) if explains else ""
    return Failure(promise.name, case.name, got, expected or "", code, hint, text, error)


def _code_of(error: BaseException) -> str | None:
    return "tensor-from-outside" if _REAL_TENSOR in str(error) else code_of(error)


def _hint(s: Subject, promise: Promise, case: Case, error: Exception, code: str) -> str:
    """The advice for an error: by its code, by the check, or the promise's own with the rules that ran, if few."""
    rules = names_of_rules(s, lambda: promise.check(s, case)) if s.declared else []
    named = f"look at {' and '.join(rules)}, which ran: " if 0 < len(rules) <= 3 else ""
    hints = [hint for one in chain(error) if code_of(one) == code and (hint := getattr(one, "hint", None))]
    advice = ADVICE.get(code, "{}" if code and code != "no-rule" else "")
    if advice and (hints or "{}" not in advice):
        return named + advice.replace("{}", hints[0] if hints else "")
    own = promise.declared if s.declared and promise.declared else promise.mend
    return getattr(error, "mend", None) or named + own
