"""Writes into docs/distributed.md what of `torch.distributed` runs, through each way to compile.

python -m tests.distributed.table
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.distributed.cases import SECTIONS
from tests.distributed.ranks import Outcome, run_cases
from tests.distributed.world import DOORS
from tests.page_tables import PageTable, outcome_cell

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"

Outcomes = dict[str, dict[str, Outcome]]


def outcomes(names: list[str]) -> Outcomes:
    """The outcomes of the cases of two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        return run_cases(Path(folder), names)


TABLE = PageTable(PAGE, "<!-- written by python -m tests.distributed.table -->", DOORS, SECTIONS)
read_section = TABLE.read


def emit_section(found: Outcomes) -> str:
    """The text of the tables with their notes."""
    return TABLE.emit({name: list(doors.values()) for name, doors in found.items()}, outcome_cell)


if __name__ == "__main__":
    TABLE.main(outcomes, emit_section)
