"""Writes into docs/export.md how far `torch.export` goes with each case.

python -m tests.export.table
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docs.wrap import wrap
from tests.export.cases import CASES, MISFIT, SECTIONS, UNFLATTENED
from tests.export.outcomes import STEPS, Outcome, run_case

PAGE = Path(__file__).parents[2] / "docs" / "export.md"
BEGIN, END = "<!-- written by python -m tests.export.table -->", "<!-- end -->"
COLUMNS = ("`export`", "`module()`", "`save`, `load`", "`run_decompositions`", "AOTInductor")
LONGEST = 160  # of what an error said

# What came of each step with strict=False and with strict=True.
Outcomes = dict[str, tuple[Outcome, Outcome]]


def outcomes(name: str) -> Outcomes:
    """What came of a case; AOTInductor compiles the program of strict=False alone."""
    options = options_of(name)
    loose = run_case(CASES[name], strict=False, **options)
    strict = run_case(CASES[name], strict=True, steps=STEPS[:-1], **options)
    return {step: (loose[step], strict.get(step, loose[step])) for step in STEPS}


def options_of(name: str) -> dict[str, Any]:
    """How the cases of a section are run."""
    section = name.partition(": ")[0]
    return {"flattened": section != UNFLATTENED, "fits": section != MISFIT}


def emit_section(found: dict[str, Outcomes]) -> str:
    """The text of the tables with their notes."""
    notes: dict[str, int] = {}
    lines = [BEGIN, ""]
    for section, cases in SECTIONS.items():
        lines += [f"| {section} | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
        for name in cases:
            cells = found[f"{section}: {name}"].values()
            lines.append(f"| {name} | {' | '.join(_cell(*pair, notes) for pair in cells)} |")
        lines.append("")
    lines += [f"{number}. {note}" for note, number in notes.items()]
    return wrap("\n".join([*lines, "", END])).rstrip("\n")


def _cell(loose: Outcome, strict: Outcome, notes: dict[str, int]) -> str:
    shown = _outcome(loose, notes)
    if strict == loose:
        return shown
    return f"{shown}; strict: {_outcome(strict, notes)}"


def _outcome(outcome: Outcome, notes: dict[str, int]) -> str:
    kind, said = outcome
    if not said:
        return kind or "not run"
    note = f"`{said.replace('`', '').replace('|', '/')[:LONGEST]}`"
    return f"{kind} ({notes.setdefault(note, len(notes) + 1)})"


def read_section(text: str) -> str:
    """The tables of a page."""
    return text[text.index(BEGIN) : text.index(END) + len(END)]


def main() -> None:
    """Writes the page; with words as arguments, prints the outcome of the cases that have one in their names."""
    if words := sys.argv[1:]:
        for name in (name for name in CASES if any(word in name for word in words)):
            print(name, *(f"    {step:20} {pair}" for step, pair in outcomes(name).items()), sep="\n")
        return
    section = emit_section({name: outcomes(name) for name in CASES})
    pattern = f"{re.escape(BEGIN)}.*?{re.escape(END)}"
    PAGE.write_text(re.sub(pattern, lambda _: section, PAGE.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    main()
