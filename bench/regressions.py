"""Compares results with a saved run; the exit status is 1 if one of our own figures got worse beyond the noise.

    python -m bench.regressions old/wrappers.json                  # against bench/results/wrappers.json
    python -m bench.regressions old/wrappers.json new/wrappers.json
    python -m bench.regressions old [new]                          # every file that both folders hold

On the same machine with the same versions, times are compared. Otherwise the ratios to other rows of the same run are
compared, since they carry over. A figure is worse if it grew by more than a tenth *and* the interquartile ranges do not
overlap: `low` of the new run is above `high` of the old one. A change with overlapping ranges is *noise*. Rivals and
eager mode are shown and cannot fail.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from bench.report import Row, load_rows, wide_console

RESULTS = Path(__file__).parent / "results"
THRESHOLD = 1.1  # growth that is reported


@dataclass(frozen=True)
class Change:
    """The change of one figure between two runs.

    Attributes:
        row: The figure in the new run.
        growth: New figure / old figure.
        verdict: "worse", "better", "noise", "new", or "" for no change.
    """

    row: Row
    growth: float
    verdict: str


def compare_runs(before: Sequence[Row], after: Sequence[Row], *, by_ratio: bool) -> list[Change]:
    """Returns the change of each row of `after`; a new row has growth 1, and a vanished row is skipped."""
    known = {(row.group, row.name): row for row in before}
    return [_compare(known.get((row.group, row.name)), row, by_ratio) for row in after]


def _compare(before: Row | None, after: Row, by_ratio: bool) -> Change:
    if before is None:
        return Change(after, 1.0, "new")
    shared = [name for name in after.ratios if before.ratios.get(name)]
    references = [after.ratios[name] / before.ratios[name] for name in shared]
    timed = after.timing.median / before.timing.median if before.timing.median else 1.0
    growth = min(references, key=lambda growth: abs(growth - 1)) if by_ratio and references else timed
    if 1 / THRESHOLD <= growth <= THRESHOLD:
        return Change(after, growth, "")
    if growth == 0:  # a count, such as the number of launches, has gone to none
        return Change(after, growth, "better")
    pace = timed / growth  # by how much the machine as a whole is slower in the new run
    if growth > 1:
        verdict = "worse" if after.timing.low / pace > before.timing.high else "noise"
    else:
        verdict = "better" if after.timing.high / pace < before.timing.low else "noise"
    return Change(after, growth, verdict)


def show_changes(changes: Sequence[Change]) -> None:
    """Prints a table of all changes."""
    table = Table("", "", "now", "times before", "")
    for change in changes:
        cells = change.row.group, change.row.name, str(change.row.timing), f"{change.growth:.2f}"
        table.add_row(*cells, change.verdict, style="bold" if change.verdict == "worse" else None)
    wide_console().print(table)


def pair_files(before: Path, after: Path | None) -> list[tuple[Path, Path]]:
    """Returns the pairs of files to compare; of two folders, the files that both contain.

    Raises:
        ValueError: The folders have no file in common.
    """
    if not before.is_dir():
        return [(before, after or RESULTS / before.name)]
    after = after or RESULTS
    pairs = [(old, after / old.name) for old in sorted(before.glob("*.json")) if (after / old.name).exists()]
    if not pairs:
        raise ValueError(
            f"expected files that `make bench` wrote, such as wrappers.json, in {before} and {after}"
        )
    return pairs


def show_comparison(old: Path, new: Path) -> int:
    """Prints the changes of one file; returns how many of our figures are worse."""
    before, old_machine = load_rows(old)
    after, machine = load_rows(new)
    changes = compare_runs(before, after, by_ratio=machine != old_machine)
    show_changes(changes)
    if machine != old_machine:
        print("Another machine or other versions: ratios are compared, not times.")
    worse = sum(change.verdict == "worse" and change.row.ours for change in changes)
    gone = {(row.group, row.name) for row in before} - {(row.group, row.name) for row in after}
    print(f"{new.name}: {worse} of our figures worse, {len(gone)} rows gone.")
    return worse


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if a figure of ours is worse, 2 if a file is not a saved run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path, nargs="?", help="default: the same name in bench/results")
    options = parser.parse_args(arguments)
    try:
        worse = [show_comparison(old, new) for old, new in pair_files(options.before, options.after)]
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 1 if any(worse) else 0


if __name__ == "__main__":
    sys.exit(main())
