"""Rows of figures: printed as tables, and saved as JSON and as a Markdown page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
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
    """One figure, and its ratios to the references of its group.

    Attributes:
        group: The table of the row; the rows of a group are consecutive.
        name: The measured subject.
        timing: The figure, in `unit`.
        ratios: Heading -> ratio.
        unit: The heading of the figures.
        ours: Whether the figure measures this project; `bench.regressions` then fails if it gets worse.
    """

    group: str
    name: str
    timing: Timing
    ratios: dict[str, float] = field(default_factory=dict)
    unit: str = MICROSECONDS
    ours: bool = False

    def cells(self, ratios: Iterable[str]) -> list[str]:
        """Returns the cells of a table row with these ratios; a ratio that the row lacks is blank."""
        cells = (f"{self.ratios[name]:.2f}" if name in self.ratios else "" for name in ratios)
        return [self.name, str(self.timing), *cells]


def group_rows(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Returns the groups, each with its rows."""
    return [(group, list(members)) for group, members in groupby(rows, key=lambda row: row.group)]


def _ratios_of(rows: Sequence[Row]) -> list[str]:
    """Returns the headings of the ratios of a group; a row need not have all of them."""
    return list(dict.fromkeys(name for row in rows for name in row.ratios))


# ---------------------------------------------------------------------------------------------------------
# printing and saving
# ---------------------------------------------------------------------------------------------------------


def wide_console() -> Console:
    """Returns a console of at least `WIDTH` columns: rich assumes 80 for a log file, which would truncate ratios."""
    return Console(width=max(WIDTH, Console().width))


def print_rows(rows: Sequence[Row]) -> None:
    """Prints one table per group."""
    for group, members in group_rows(rows):
        table, ratios = Table(title=group), _ratios_of(members)
        for i, heading in enumerate(["", members[0].unit, *ratios]):
            table.add_column(heading, justify="right" if i else "left", no_wrap=i < 2)
        for row in members:
            table.add_row(*row.cells(ratios))
        wide_console().print(table)


def format_markdown(
    rows: Sequence[Row],
    machine: dict[str, Any],
    command: str = "bench.compare",
    how: str = "Measured side by side",
) -> str:
    """Returns the tables as a Markdown page."""
    lines = [f"{how} by `python -m {command}`.", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    for group, members in group_rows(rows):
        ratios = _ratios_of(members)
        headings = ["", members[0].unit, *ratios]
        rule = "|---" + "|---:" * (len(headings) - 1) + "|"
        lines += ["", f"## {group}", "", f"| {' | '.join(headings)} |", rule]
        lines += [f"| {' | '.join(row.cells(ratios))} |" for row in members]
    return "\n".join(lines) + "\n"


def save_rows(rows: Sequence[Row], machine: dict[str, Any], path: Path, **more: Any) -> None:
    """Writes the rows to `path` as JSON, and to the same path with the suffix `.md` as a page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"machine": machine, **more, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    words = {name: more[name] for name in ("command", "how") if name in more}
    path.with_suffix(".md").write_text(format_markdown(rows, machine, **words))


def load_rows(path: Path) -> tuple[list[Row], dict[str, Any]]:
    """Returns the rows of a saved run, and its machine.

    Raises:
        ValueError: The file is not a saved run.
    """
    try:
        record = json.loads(path.read_text())
        rows = [Row(**{**row, "timing": Timing(**row["timing"])}) for row in record["rows"]]
        return rows, record["machine"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"expected a file that `make bench` wrote, such as wrappers.json; {path}: {error!r}"
        ) from error
