"""The records of the kit: promises, failures, outcomes, and a report: one screen, the full text, files for programs."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal
from xml.etree import ElementTree

from subclasses.testing.calls import WHOLE, Case, Table
from subclasses.testing.errors import Broken, chain, shown
from subclasses.testing.subject import Level, Subject

State = Literal["kept", "broken", "skipped"]


@dataclass(frozen=True)
class Promise:
    """One promise: a row of the kit's table.

    Attributes:
        name: the name by which ``skip=`` and ``only=`` take it.
        says: the promise in a sentence.
        oracle: ``oracle(subject, case)`` or, with a context, ``oracle(subject, case, setting)`` runs a case and raises
            where it finds a difference.
        cases: makes the cases for a class, or is a table of them; by default the class as a whole is the one case.
        context: makes the settings in each of which a case runs, for an oracle that takes one.
        needs: facts of the class, of the table ``FACTS``, without which the promise cannot be checked.
        level: the least level at which it is tried.
        tells: whether other promises leave out the calls that fail.
        right: whether it leaves out the calls that failed for such a promise.
        may_refuse: whether a class may refuse its cases.
        mend: advice for a class that breaks it.
        declared: advice for a declared class, where ``mend`` fits only a class written by hand.
    """

    name: str
    says: str
    oracle: Callable[..., None]
    cases: Callable[[Subject], Iterable[Case]] | Table = lambda s: [WHOLE]
    context: Callable[[Subject], Iterable[Any]] | None = None
    needs: tuple[str, ...] = ()
    level: Level = "smoke"
    tells: bool = False
    right: bool = False
    may_refuse: bool = True
    mend: str = ""
    declared: str = ""


@dataclass(frozen=True)
class Failure:
    """One case that failed.

    Attributes:
        promise: the name of the promise.
        case: the call, with its context; empty for a promise about the class as a whole.
        got: the result, or the error.
        expected: the result that was expected, where one was.
        code: the code of the error, if it is one of this package, or a code of the kit.
        hint: the way to fix it, for the first failure of a promise.
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
        mend: the way to fix it, if broken.
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


# ---- the report ----------------------------------------------------------------------------------------------

LINES, WIDTH = 24, 110
_REASONS = 3  # why promises were not tried, other than for want of an option, and lines for each
_OPTION = re.compile(r"pass (\w+=).*")
_FOLDERS = re.compile(r"/\S*/(?=[^/\s]+/[^/\s]+\.py:\d)")  # all folders of a path but the last


@dataclass(frozen=True)
class Report:
    """The outcome of each promise, for one class; ``str(report)`` fits one screen.

    Attributes:
        name: the name of the class.
        outcomes: of the promises, in order.
        warnings: lines on comparisons left out for want of an option; the report shows them first.
        derived: the options that were not passed, each with the kit's replacement.
    """

    name: str
    outcomes: tuple[Outcome, ...]
    warnings: tuple[str, ...] = ()
    derived: tuple[tuple[str, str], ...] = ()

    def of(self, state: str) -> list[Outcome]:
        """The outcomes that are ``"kept"``, ``"broken"`` or ``"skipped"``."""
        return [o for o in self.outcomes if o.state == state]

    @property
    def broken(self) -> list[str]:
        """Names of the promises that are broken."""
        return [o.promise.name for o in self.of("broken")]

    @property
    def refused(self) -> dict[str, list[str]]:
        """The calls that the class refused, each once with its message, and the promises in which it did."""
        return _grouped((line, o.promise.name) for o in self.outcomes for line in o.refused)

    def __str__(self) -> str:
        head = _wrapped([self._head(), *self.warnings], 1)
        tail = self._not_tried() + _wrapped([*self._derived(), "all of it: report.details()"], 1)
        return "\n".join([*head, *self._causes(LINES - len(head) - len(tail)), *tail])

    def details(self) -> str:
        """Returns all findings: each broken promise in full, the promises not tried, and the refused calls."""
        skipped = [f"not tried: {o.promise.name}: {o.detail}" for o in self.of("skipped")]
        refused = [f"refused in {', '.join(names)}: {line}" for line, names in self.refused.items()]
        parts = [*([str(o)] for o in self.of("broken")), skipped, self._derived(), refused]
        return "\n".join(
            [self._head(), *self.warnings, *(line for part in parts if part for line in ("", *part))]
        )

    # ---- for other programs --------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Returns the outcomes as JSON: the state and detail of each promise, and a record of each case that failed."""
        outcomes = [
            {
                "promise": o.promise.name,
                "state": o.state,
                "detail": o.detail,
                "mend": o.mend,
                "refused": o.refused,
                "failures": [{k: v for k, v in vars(f).items() if k != "error"} for f in o.failures],
            }
            for o in self.outcomes
        ]
        return json.dumps({"class": self.name, "outcomes": outcomes, "derived": dict(self.derived)}, indent=1)

    def to_junit(self) -> str:
        """Returns the outcomes as a test suite in JUnit's XML, one test for each promise."""
        counts = {"failures": self.broken, "skipped": self.of("skipped"), "tests": self.outcomes}
        root = ElementTree.Element("testsuite", {k: str(len(of)) for k, of in counts.items()}, name=self.name)
        for outcome in self.outcomes:
            test = ElementTree.SubElement(root, "testcase", classname=self.name, name=outcome.promise.name)
            kind = {"broken": "failure", "skipped": "skipped"}.get(outcome.state)
            if kind is not None:
                ElementTree.SubElement(test, kind, message=outcome.detail).text = str(outcome)
        return ElementTree.tostring(root, encoding="unicode")

    # ---- the parts of the screen ---------------------------------------------------------------------------

    def _head(self) -> str:
        kept, broken, skipped = (len(self.of(state)) for state in ("kept", "broken", "skipped"))
        refused = f"; {len(self.refused)} calls refused" if self.refused else ""
        return f"{self.name} keeps {kept} promises, breaks {broken}, {skipped} not tried{refused}"

    def _causes(self, room: int) -> list[str]:
        """The broken promises by cause, in as many lines as there is room for."""
        groups = [*_grouped((_cause(o), o) for o in self.of("broken")).values()]
        each = max(2, min(3, room // max(len(groups), 1)))
        count = len(groups) if each * len(groups) <= room else (room - 1) // each
        heads = [
            (_wrapped([f"- {_names(group)}: {group[0].detail}"], 1), group[0].mend)
            for group in groups[:count]
        ]
        lines = [
            line for head, mend in heads for line in (*head, *_wrapped([f"  mend: {mend}"], each - 1, "    "))
        ]
        rest = [o.promise.name for group in groups[count:] for o in group]
        return lines + _wrapped([f"- and {', '.join(rest)}"] if rest else [], 1)

    def _not_tried(self) -> list[str]:
        """The promises that were not tried, by the option to pass, then by other reasons."""
        groups = _grouped((_OPTION.sub(r"\1", o.detail), o) for o in self.of("skipped"))
        options = [f"{name} for {_names(group, 3)}" for name, group in groups.items() if name[-1:] == "="]
        reasons = [group for name, group in groups.items() if name[-1:] != "="]
        texts = [f"pass {'; '.join(options)}"] if options else []
        texts += [f"{_names(group)}: {group[0].detail}" for group in reasons[:_REASONS]]
        texts += [", ".join(map(_names, reasons[_REASONS:]))] if reasons[_REASONS:] else []
        return _wrapped([f"not tried: {text}" for text in texts], _REASONS)

    def _derived(self) -> list[str]:
        return [f"derived: {option}= from {how}" for option, how in self.derived]


def _cause(outcome: Outcome) -> str:
    """The cause of a broken promise: an error below the kit's own, or the advice.

    Promises that one fault breaks have the same cause.
    """
    error = next((e for e in chain(outcome.error) if not isinstance(e, Broken)), None)
    is_own = outcome.mend.endswith((outcome.promise.mend, outcome.promise.declared or outcome.promise.mend))
    return outcome.mend if error is None or not is_own else shown(error)


def _grouped(pairs: Iterable[tuple[str, Any]]) -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = {}
    for key, item in pairs:
        groups.setdefault(key, []).append(item)
    return groups


def _wrapped(texts: list[str], most: int, indent: str = "  ") -> list[str]:
    """The lines of each text, and no more than ``most`` of them."""
    options: Any = {"subsequent_indent": indent, "max_lines": most, "placeholder": " ..."}
    return [line for text in texts for line in textwrap.wrap(_FOLDERS.sub("", text), WIDTH, **options)]


def _names(group: list[Outcome], most: int = 5) -> str:
    names = [o.promise.name for o in group]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
