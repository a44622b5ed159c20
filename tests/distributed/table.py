"""Writes into docs/distributed.md what of `torch.distributed` runs, through each way to compile.

python -m tests.distributed.table
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from docs.wrap import wrap
from tests.distributed.cases import CASES, SECTIONS
from tests.distributed.ranks import Outcome, run_cases
from tests.distributed.world import DOORS

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
BEGIN, END = "<!-- written by python -m tests.distributed.table -->", "<!-- end -->"
LONGEST = 160  # of what an error said

Outcomes = dict[str, dict[str, Outcome]]


def outcomes(names: list[str]) -> Outcomes:
    """What came of the cases of two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        return run_cases(Path(folder), names)


def emit_section(found: Outcomes) -> str:
    """The text of a table with its notes."""
    notes: dict[str, int] = {}
    lines = [BEGIN, ""]
    for section, cases in SECTIONS.items():
        lines += [f"| {section} | {' | '.join(DOORS)} |", "|---" * (len(DOORS) + 1) + "|"]
        for name in cases:
            cells = found[f"{section}: {name}"].values()
            lines.append(f"| {name} | {' | '.join(_cell(outcome, notes) for outcome in cells)} |")
        lines.append("")
    lines += [f"{number}. {note}" for note, number in notes.items()]
    return wrap("\n".join([*lines, "", END])).rstrip("\n")


def _cell(outcome: Outcome, notes: dict[str, int]) -> str:
    kind, said = outcome
    if not said:
        return kind
    note = f"`{said.replace('`', '').replace('|', '/')[:LONGEST]}`"
    return f"{kind} ({notes.setdefault(note, len(notes) + 1)})"


def read_section(text: str) -> str:
    """The tables of a page."""
    return text[text.index(BEGIN) : text.index(END) + len(END)]


def main() -> None:
    """Writes the page; with words as arguments, prints the outcome of the cases that have one in their names."""
    if words := sys.argv[1:]:
        chosen = [name for name in CASES if any(word in name for word in words)]
        for name, cells in outcomes(chosen).items():
            print(name, *(f"    {door:20} {kind:8} {said}" for door, (kind, said) in cells.items()), sep="\n")
        return
    section = emit_section(outcomes(list(CASES)))
    pattern = f"{re.escape(BEGIN)}.*?{re.escape(END)}"
    PAGE.write_text(re.sub(pattern, lambda _: section, PAGE.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    main()
