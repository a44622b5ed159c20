"""What the kit found in one class: one screen, grouped by cause, and all of it in :meth:`Report.details`."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from subclasses.testing.errors import Broken, chain, shown
from subclasses.testing.property import Outcome

LINES, WIDTH = 24, 110
_REASONS, _LINES = 3, 3  # why promises were not tried, other than for want of an option, and lines for each
_OPTION = re.compile(r"pass (\w+=).*")
_FOLDERS = re.compile(r"/\S*/(?=[^/\s]+/[^/\s]+\.py:\d)")  # all but the last of a path


@dataclass(frozen=True)
class Report:
    """The outcome of each promise, for one class; ``str(report)`` fits one screen.

    Attributes:
        name: the name of the class.
        outcomes: of the promises, in order.
        warnings: what was not compared for want of an option, which is told first.
        derived: the options that were not passed and what the kit took instead.
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

    def __str__(self) -> str:
        head = [self._head(), *self.warnings]
        tail = [*self._not_tried(), *self._derived(), "all of it: report.details()"]
        head, tail = ([_cut(line) for line in lines] for lines in (head, tail))
        return "\n".join([*head, *self._causes(LINES - len(head) - len(tail)), *tail])

    def details(self) -> str:
        """Returns all that was found: each broken promise in full, what was not tried, what was refused."""
        skipped = [f"not tried: {o.promise.name}: {o.detail}" for o in self.of("skipped")]
        refused = [f"refused in {o.promise.name}: {line}" for o in self.outcomes for line in o.refused]
        parts = [[str(o)] for o in self.of("broken")] + [skipped, list(self._derived()), refused]
        lines = [line for part in parts if part for line in ("", *part)]
        return "\n".join([self._head(), *self.warnings, *lines])

    # ---- the parts of the screen ---------------------------------------------------------------------------

    def _head(self) -> str:
        broken, skipped = self.of("broken"), self.of("skipped")
        calls = sum(len(o.refused) for o in self.outcomes)
        refused = f"; {calls} calls refused" if calls else ""
        kept = len(self.of("kept"))
        return f"{self.name} keeps {kept} promises, breaks {len(broken)}, {len(skipped)} not tried{refused}"

    def _causes(self, room: int) -> list[str]:
        """The broken promises by cause, in as many lines as there is room for."""
        groups = _grouped((_cause(o), o) for o in self.of("broken"))
        each = max(2, min(3, room // max(len(groups), 1)))
        shown_groups = groups if each * len(groups) <= room else groups[: (room - 1) // each]
        lines = [line for group in shown_groups for line in _show_cause(group, each - 1)]
        rest = [o.promise.name for group in groups[len(shown_groups) :] for o in group]
        return [*lines, _cut(f"- and {', '.join(rest)}")] if rest else lines

    def _not_tried(self) -> Iterator[str]:
        groups = _grouped((_OPTION.sub(r"\1", o.detail), o) for o in self.of("skipped"))
        options = {found[1]: group for group in groups if (found := _OPTION.match(group[0].detail))}
        if options:
            counts = [f"{option} for {_names(group, 3)}" for option, group in options.items()]
            wrapped = textwrap.wrap(f"not tried: pass {'; '.join(counts)}", WIDTH, subsequent_indent="  ")
            yield from wrapped
        others = [group for group in groups if not _OPTION.match(group[0].detail)]
        for group in others[:_REASONS]:
            line = f"not tried: {_names(group)}: {_FOLDERS.sub('', group[0].detail)}"
            yield from textwrap.wrap(
                line, WIDTH, subsequent_indent="  ", max_lines=_LINES, placeholder=" ..."
            )
        if len(others) > _REASONS:
            yield f"not tried: {', '.join(_names(group) for group in others[_REASONS:])}"

    def _derived(self) -> Iterator[str]:
        for option, how in self.derived:
            yield f"derived: {option}= from {how}"


def _cause(outcome: Outcome) -> str:
    """What two promises have in common that one fault breaks: an error below the kit's own, or the advice."""
    error = next((e for e in chain(outcome.error) if not isinstance(e, Broken)), None)
    promise = outcome.promise
    return (
        outcome.mend
        if error is None or outcome.mend not in (promise.mend, promise.declared)
        else shown(error)
    )


def _grouped(pairs: Iterable[tuple[str, Outcome]]) -> list[list[Outcome]]:
    groups: dict[str, list[Outcome]] = {}
    for key, outcome in pairs:
        groups.setdefault(key, []).append(outcome)
    return list(groups.values())


def _show_cause(group: list[Outcome], lines_of_mend: int) -> list[str]:
    first = group[0]
    mend = textwrap.wrap(
        f"mend: {_FOLDERS.sub('', first.mend)}",
        WIDTH,
        initial_indent="  ",
        subsequent_indent="    ",
        max_lines=lines_of_mend,
        placeholder=" ...",
    )
    return [_cut(f"- {_names(group)}: {first.detail}"), *mend]


def _names(group: list[Outcome], most: int = 5) -> str:
    names = [o.promise.name for o in group]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 4] + " ..."
