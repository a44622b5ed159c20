"""Figures as rows: on the screen, as JSON to compare with later, and as a Markdown page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.timing import Timing

MICROSECONDS = "µs a call"
WIDTH = 120  # columns


@dataclass(frozen=True)
class Row:
    """One figure, and how many times the group's references it is.

    Attributes:
        group: The table that it stands in; rows of a group follow one another.
        name: What was measured.
        timing: The figure, in `unit`.
        ratios: Heading -> ratio.
        unit: Heading of the figures.
        ours: Whether the figure is one of this project; it may then not get worse.
    """

    group: str
    name: str
    timing: Timing
    ratios: dict[str, float] = field(default_factory=dict)
    unit: str = MICROSECONDS
    ours: bool = False

    def cells(self) -> list[str]:
        """As a line of a table."""
        return [self.name, str(self.timing), *(f"{ratio:.2f}" for ratio in self.ratios.values())]

    def headings(self) -> list[str]:
        """What stands over it."""
        return ["", self.unit, *self.ratios]


def group_rows(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """The rows of each group."""
    return [(group, list(members)) for group, members in groupby(rows, key=lambda row: row.group)]


# ---------------------------------------------------------------------------------------------------------
# showing and keeping
# ---------------------------------------------------------------------------------------------------------


def wide_console() -> Console:
    """Where tables are shown; a log has no width, and the 80 columns it gets would cut ratios."""
    return Console(width=max(WIDTH, Console().width))


def print_rows(rows: Sequence[Row]) -> None:
    """One table per group."""
    for group, members in group_rows(rows):
        table = Table(title=group)
        for i, heading in enumerate(members[0].headings()):
            table.add_column(heading, justify="right" if i else "left", no_wrap=i < 2)
        for row in members:
            table.add_row(*row.cells())
        wide_console().print(table)


def format_markdown(rows: Sequence[Row], machine: dict[str, Any], command: str = "bench.compare") -> str:
    """The same tables as a page."""
    lines = [f"Measured side by side by `python -m {command}`.", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    for group, members in group_rows(rows):
        headings = members[0].headings()
        rule = "|---" + "|---:" * (len(headings) - 1) + "|"
        lines += ["", f"## {group}", "", f"| {' | '.join(headings)} |", rule]
        lines += [f"| {' | '.join(row.cells())} |" for row in members]
    return "\n".join(lines) + "\n"


def save_rows(rows: Sequence[Row], machine: dict[str, Any], path: Path, **more: Any) -> None:
    """Writes `path` (JSON) and the page beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"machine": machine, **more, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    path.with_suffix(".md").write_text(format_markdown(rows, machine, more.get("command", "bench.compare")))


def load_rows(path: Path) -> tuple[list[Row], dict[str, Any]]:
    """The rows of a saved run, and its machine.

    Raises:
        ValueError: The file holds no saved run.
    """
    try:
        record = json.loads(path.read_text())
        rows = [Row(**{**row, "timing": Timing(**row["timing"])}) for row in record["rows"]]
        return rows, record["machine"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"expected a file that `make bench` wrote, such as wrappers.json; {path}: {error!r}"
        ) from error
