"""What two reports differ in.

Programs are paired by function and signature, then by function and label, then by function in order. Times are told
and count for nothing: two measurements are never equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from desugar.explain.read import ProgramFacts, ReportFacts
from desugar.ir.record_base import Record


@dataclass(frozen=True, slots=True)
class Change(Record):
    """Lines of one kind that only one of the reports has, or of which it has another number.

    Attributes:
        what: The kind: "guards", "ops", ...
        removed: (line, how often less).
        added: (line, how often more).
    """

    what: str
    removed: tuple[tuple[str, int], ...]
    added: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class ProgramDiff(Record):
    """What a program differs in.

    Attributes:
        label: Of the program in the second report.
        changes: Lines that differ.
        values: (name, before, after) of numbers and words that differ.
        seconds: (what took them, before, after), equal or not; None where one was not measured.
    """

    label: str
    changes: tuple[Change, ...]
    values: tuple[tuple[str, str, str], ...]
    seconds: tuple[tuple[str, float | None, float | None], ...]

    @property
    def differs(self) -> bool:
        """True if more than times differ."""
        return bool(self.changes or self.values)


@dataclass(frozen=True, slots=True)
class ReportDiff(Record):
    """What two reports differ in.

    Attributes:
        before, after: Titles.
        removed, added: Labels of programs without a counterpart.
        programs: The others, in the second report's order.
        changes: Fallbacks, graph breaks and what was not compiled, in the whole run, that differ.
        values: Versions that differ, as (name, before, after).
    """

    before: str
    after: str
    removed: tuple[str, ...]
    added: tuple[str, ...]
    programs: tuple[ProgramDiff, ...]
    changes: tuple[Change, ...]
    values: tuple[tuple[str, str, str], ...]

    @property
    def differs(self) -> bool:
        """True if more than times and versions differ."""
        return bool(
            self.removed or self.added or self.changes or any(program.differs for program in self.programs)
        )


def compare_reports(before: ReportFacts, after: ReportFacts) -> ReportDiff:
    """Compares two reports."""
    pairs = _pairs(before.programs, after.programs)
    known = {id(program) for pair in pairs for program in pair}
    versions, later = dict(before.versions), dict(after.versions)
    return ReportDiff(
        before.title,
        after.title,
        tuple(program.label for program in before.programs if id(program) not in known),
        tuple(program.label for program in after.programs if id(program) not in known),
        tuple(_compare(*pair) for pair in pairs),
        tuple(
            change
            for what, one, other in (
                ("materializing fallbacks", before.materialized, after.materialized),
                ("not compiled", before.not_compiled, after.not_compiled),
                ("graph breaks", before.breaks, after.breaks),
                ("slow paths", before.slow, after.slow),
            )
            for change in _changes(what, one, other)
        ),
        tuple(
            (name, version, later[name])
            for name, version in versions.items()
            if later.get(name, version) != version
        ),
    )


# -------------------------------------------------------------------------------------------------- programs


def _pairs(
    before: Sequence[ProgramFacts], after: Sequence[ProgramFacts]
) -> list[tuple[ProgramFacts, ProgramFacts]]:
    """The programs that are each other's counterparts, in the order of the second report."""
    keys: tuple[Callable[[ProgramFacts], Hashable], ...] = (
        lambda program: (program.name, program.signature, program.guards.keys()),
        lambda program: (program.name, program.signature),
        lambda program: (program.name, program.label),
        lambda program: program.name,
    )
    left, found = list(before), {}
    for key in keys:
        for number, program in enumerate(after):
            if number not in found:
                match = next((one for one in left if key(one) == key(program)), None)
                if match is not None:
                    left.remove(match)
                    found[number] = (match, program)
    return [found[number] for number in sorted(found)]


def _compare(before: ProgramFacts, after: ProgramFacts) -> ProgramDiff:
    changes = (
        ("signature", Counter(before.signature), Counter(after.signature)),
        ("ops", before.ops, after.ops),
        ("graph ops", before.nodes, after.nodes),
        ("guards", before.guards, after.guards),
        ("materializing fallbacks", before.materialized, after.materialized),
        ("aliasing and mutation", before.effects, after.effects),
    )
    values = (
        ("error", before.error or "none", after.error or "none"),
        ("calls", str(before.calls), str(after.calls)),
        ("bytes saved for the backward", _bytes(before), _bytes(after)),
        ("checks left out", str(before.left_out), str(after.left_out)),
        *_verdicts(before.verdict, after.verdict),
    )
    took, takes = dict(before.seconds), dict(after.seconds)
    return ProgramDiff(
        after.label,
        tuple(change for what, old, new in changes for change in _changes(what, old, new)),
        tuple(value for value in values if value[1] != value[2]),
        tuple((name, took.get(name), takes.get(name)) for name in {**took, **takes}),
    )


def _verdicts(before: str, after: str) -> Iterator[tuple[str, str, str]]:
    """What other ways do with the same call, where both reports asked for that."""
    if before and after:
        yield "in other ways", before, after


def _bytes(program: ProgramFacts) -> str:
    return "by size" if program.saved_bytes is None else str(program.saved_bytes)


def _changes(what: str, before: Counter[str], after: Counter[str]) -> Iterator[Change]:
    removed, added = (tuple((one - other).items()) for one, other in ((before, after), (after, before)))
    if removed or added:
        yield Change(what, removed, added)
