"""Writes into docs/distributed.md what of `torch.distributed` runs, through each way to compile.

python -m tests.distributed.table
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.distributed.cases import CASES, SECTIONS
from tests.distributed.ranks import Outcome, run_cases
from tests.distributed.world import DOORS
from tests.page_tables import PageTable, outcome_cell

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"

Outcomes = dict[str, dict[str, Outcome]]


def outcomes(names: list[str]) -> Outcomes:
    """What came of the cases of two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        return run_cases(Path(folder), names)


TABLE = PageTable(PAGE, "<!-- written by python -m tests.distributed.table -->", DOORS, SECTIONS)
read_section = TABLE.read


def emit_section(found: Outcomes) -> str:
    """The text of the tables with their notes."""
    return TABLE.emit({name: list(doors.values()) for name, doors in found.items()}, outcome_cell)


def main() -> None:
    """Writes the page; with words as arguments, prints the outcome of the cases that have one in their names."""
    if words := sys.argv[1:]:
        chosen = [name for name in CASES if any(word in name for word in words)]
        for name, cells in outcomes(chosen).items():
            print(name, *(f"    {door:20} {kind:8} {said}" for door, (kind, said) in cells.items()), sep="\n")
        return
    section = emit_section(outcomes(list(CASES)))
    TABLE.write(section)


if __name__ == "__main__":
    main()
