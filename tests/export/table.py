"""Writes into docs/export.md how far `torch.export` goes with each case.

python -m tests.export.table
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.export.cases import CASES, MISFIT, SECTIONS, UNFLATTENED
from tests.export.outcomes import STEPS, Outcome, run_case
from tests.page_tables import Notes, PageTable, outcome_cell

PAGE = Path(__file__).parents[2] / "docs" / "export.md"
COLUMNS = ("`export`", "`module()`", "`save`, `load`", "`run_decompositions`", "AOTInductor")

# The outcome of each step with strict=False and with strict=True.
Outcomes = dict[str, tuple[Outcome, Outcome]]


def outcomes(names: list[str]) -> dict[str, Outcomes]:
    """The outcomes of cases; AOTInductor compiles the program of strict=False alone."""
    return {name: _outcomes_of(name) for name in names}


def _outcomes_of(name: str) -> Outcomes:
    options = options_of(name)
    loose = run_case(CASES[name], strict=False, **options)
    strict = run_case(CASES[name], strict=True, steps=STEPS[:-1], **options)
    return {step: (loose[step], strict.get(step, loose[step])) for step in STEPS}


def options_of(name: str) -> dict[str, Any]:
    """How the cases of a section are run."""
    section = name.partition(": ")[0]
    return {"flattened": section != UNFLATTENED, "fits": section != MISFIT}


TABLE = PageTable(PAGE, "<!-- written by python -m tests.export.table -->", COLUMNS, SECTIONS)
read_section = TABLE.read


def emit_section(found: dict[str, Outcomes]) -> str:
    """The text of the tables with their notes."""
    return TABLE.emit({name: list(steps.values()) for name, steps in found.items()}, _cell)


def _cell(outcomes: tuple[Outcome, Outcome], notes: Notes) -> str:
    loose, strict = outcomes
    shown = outcome_cell(loose, notes)
    return shown if strict == loose else f"{shown}; strict: {outcome_cell(strict, notes)}"


if __name__ == "__main__":
    TABLE.main(outcomes, emit_section)
