"""A promise as a row of the table, its failures as records, and the loop over cases, contexts and oracles."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from subclasses.testing.errors import Broken, Skipped, chain, code_of, first_three, problem, tried
from subclasses.testing.reach import WHOLE, Case, names_of_rules
from subclasses.testing.subject import Level, Subject

State = Literal["kept", "broken", "skipped"]


@dataclass(frozen=True)
class Promise:
    """One promise: a row of the kit's table.

    Attributes:
        name: the name by which ``skip=`` and ``only=`` take it.
        says: the promise in a sentence.
        check: the oracle: ``check(subject, case)`` or, with a context, ``check(subject, case, setting)`` runs a case
            and raises where it finds a difference.
        cases: makes the cases for a class; by default the class as a whole is the one case.
        mend: advice for a class that breaks it.
        declared: advice for a declared class, where ``mend`` fits only a class written by hand.
        level: the least level at which it is tried.
        may_refuse: whether a class may refuse its cases.
        needs: functions of the class that raise ``Skipped`` where the promise cannot be checked.
        tells: whether other promises leave out the calls that fail.
        right: whether it leaves out the calls that failed for such a promise.
        context: makes the settings in each of which a case runs, for a check that takes one.
    """

    name: str
    says: str
    check: Callable[..., None]
    cases: Callable[[Subject], Iterable[Case]] = lambda s: [WHOLE]
    mend: str = ""
    declared: str = ""
    level: Level = "smoke"
    may_refuse: bool = True
    needs: tuple[Callable[[Subject], Any], ...] = ()
    tells: bool = False
    right: bool = False
    context: Callable[[Subject], Iterable[Any]] | None = None


@dataclass(frozen=True)
class Failure:
    """One case that failed.

    Attributes:
        promise: the name of the promise.
        case: the call, with its context; empty for a promise about the class as a whole.
        got: the result, or the error.
        expected: the result that was expected, where one was.
        code: the code of the error, if it is one of this package.
        hint: how to mend it, for the first failure of a promise.
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
        mend: how to mend it, if broken.
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
    """Checks each case of a promise in each setting, and gathers those that fail; clean refusals are noted.

    Where the class is known to take a call in eager mode, only a ``NotImplementedError`` refuses it elsewhere.
    """
    s.refused.clear()
    failures: list[Failure] = []
    skipped = ""
    trials, failure = tried(_trials, s, promise)
    for case, words, run in [(WHOLE, "", WHOLE.run)] if failure else trials:
        error = failure or tried(run)[1]
        if error is None:
            continue
        if isinstance(error, Skipped):
            skipped = str(error)
            continue
        if promise.tells:
            s.wrong_values.add(case.name)
        is_refused = promise.may_refuse and s.refuses(
            case.name or promise.name, error, deliberate=not case.works
        )
        if not is_refused:
            hint = "" if failures else _hint(s, promise, run, error)
            failures.append(_record(promise, f"{case.name}{words}", error, hint))
    refused = tuple(dict.fromkeys(f"{call}: {message}" for call, message in s.refused))
    if failures:
        detail = first_three([failure.text for failure in failures], "calls")
        return Outcome(promise, "broken", detail, failures[0].hint, refused, tuple(failures))
    return Outcome(promise, "skipped" if skipped else "kept", skipped, "", refused)


def _trials(s: Subject, promise: Promise) -> list[tuple[Case, str, Callable[[], None]]]:
    """Each case in each setting: the case, words for the setting, and the check."""
    for need in promise.needs:
        need(s)
    cases = [*promise.cases(s)]
    left = [case for case in cases if not (promise.right and case.name in s.wrong_values)]
    if cases and not left:
        raise Skipped("all of its calls give wrong values: see the promise `values`")
    if promise.context is None:
        return [(case, "", partial(promise.check, s, case)) for case in left]
    settings = [*promise.context(s)] if left else []
    return [(c, setting.words, partial(promise.check, s, c, setting)) for c in left for setting in settings]


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


def _record(promise: Promise, call: str, error: Exception, hint: str) -> Failure:
    text = problem(call, error)
    got, expected = (error.got, error.expected) if isinstance(error, Broken) else (problem("", error), "")
    return Failure(promise.name, call, got, expected, _code_of(error), hint, text, error)


def _code_of(error: Exception) -> str:
    """The code of an error or of one of its causes, one with advice first; empty if none has a code."""
    codes = [
        "tensor-from-outside" if _REAL_TENSOR in str(one) else getattr(one, "code", None) or ""
        for one in chain(error)
    ]
    return next((code for code in codes if code in ADVICE), next(filter(None, codes), ""))


def _hint(s: Subject, promise: Promise, run: Callable[[], Any] | None, error: Exception) -> str:
    """The advice for an error: by its code, by the check, or the promise's own with the rules that ran, if few."""
    rules = names_of_rules(s, run) if s.declared and run else []
    named = f"look at {' and '.join(rules)}, which ran: " if 0 < len(rules) <= 3 else ""
    code = _code_of(error)
    hints = [one.hint for one in chain(error) if code_of(one) == code and getattr(one, "hint", None)]
    advice = ADVICE.get(code, "{}" if code and code != "no-rule" else "")
    if advice and (hints or "{}" not in advice):
        return named + advice.replace("{}", hints[0] if hints else "")
    own = promise.declared if s.declared and promise.declared else promise.mend
    return getattr(error, "mend", None) or named + own
