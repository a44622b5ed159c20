"""Everything side by side in one process: tables on the screen; JSON, Markdown and a plot in `bench/results/`.

    python -m bench.compare                     # all of it, some minutes
    python -m bench.compare --only layers       # eager mode alone, seconds

One thread. Compiling and the first calls are not timed. Each figure is the median over the rounds, with half
the distance between the quartiles as its spread.
"""

from __future__ import annotations

import argparse
import json
import warnings
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench import layers
from bench.plots import Point, save_scaling
from bench.subjects import SUBJECTS, Subject
from bench.timing import Timing, describe_machine, time_side_by_side

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One figure, and how many times the group's references it is."""

    group: str
    name: str
    timing: Timing
    ratios: dict[str, float]

    def cells(self) -> list[str]:
        return [self.name, str(self.timing), *(f"{ratio:.2f}" for ratio in self.ratios.values())]


# ---------------------------------------------------------------------------------------------------------
# measuring
# ---------------------------------------------------------------------------------------------------------


def measure_wrappers(rounds: int) -> list[Row]:
    """The nine subjects of each mode and count, against stock `torch.compile` on each kind."""
    rows = []
    for (mode, count), subjects in groupby(SUBJECTS, key=lambda s: (s.mode, s.count)):
        torch.compiler.reset()
        calls = {
            s: s.build() for s in track(list(subjects), f"{mode}, N = {count}", console=Console(stderr=True))
        }
        timings = time_side_by_side(calls, rounds=rounds)
        rows += [_wrapper_row(subject, timings) for subject in timings]
    return rows


def _wrapper_row(subject: Subject, timings: dict[Subject, Timing]) -> Row:
    group = f"{subject.mode}, N = {subject.count}"
    stock = {s.kind: timings[s].median for s in timings if s.way == "torch.compile"}
    timing = timings[subject]
    ratios = {
        "/ stock, same kind": timing.median / stock[subject.kind],
        "/ stock, TwoTensor": timing.median / stock["TwoTensor"],
        "/ stock, plain": timing.median / stock["plain"],
    }
    return Row(group, f"{subject.kind}, {subject.way}", timing, ratios)


def measure_layers(rounds: int) -> list[Row]:
    """What is done in eager mode, against the first named of each group."""
    with torch.no_grad():
        timings = time_side_by_side(layers.make_calls(), rounds=rounds)
    first = {done: next(timings[key].median for key in timings if key[0] == done) for done, _ in timings}
    return [
        Row(done, subject, timing, {"/ first": timing.median / first[done]})
        for (done, subject), timing in timings.items()
    ]


def wrapper_points(rows: list[Row]) -> list[Point]:
    """The rows of `measure_wrappers` as points of a plot."""
    points = []
    for row in rows:
        (mode, count), (kind, way) = row.group.split(", N = "), row.name.split(", ")
        points.append(Point(mode, int(count), kind, way, row.timing.median))
    return points


MEASURES = {"layers": measure_layers, "wrappers": measure_wrappers}

# ---------------------------------------------------------------------------------------------------------
# showing
# ---------------------------------------------------------------------------------------------------------


def print_rows(rows: list[Row]) -> None:
    """One table per group."""
    for group, members in _groups(rows):
        table = Table(title=group)
        for i, heading in enumerate(_headings(members)):
            table.add_column(heading, justify="right" if i else "left", no_wrap=i < 2)
        for row in members:
            table.add_row(*row.cells())
        Console().print(table)


def format_markdown(rows: list[Row], machine: dict[str, str | int]) -> str:
    """The same tables as a page."""
    lines = ["Measured side by side by `python -m bench.compare`.", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    for group, members in _groups(rows):
        headings = _headings(members)
        rule = "|---" + "|---:" * (len(headings) - 1) + "|"
        lines += ["", f"## {group}", "", f"| {' | '.join(headings)} |", rule]
        lines += [f"| {' | '.join(row.cells())} |" for row in members]
    return "\n".join(lines) + "\n"


def _groups(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    return [(group, list(members)) for group, members in groupby(rows, key=lambda row: row.group)]


def _headings(rows: list[Row]) -> list[str]:
    return ["", "µs a call", *rows[0].ratios]


def main() -> None:
    """Measures, prints, and writes `NAME.json` and `NAME.md`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=MEASURES, help="leave the other out")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "TwoTensor does not implement", UserWarning)  # PyTorch's own class
    machine = describe_machine()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in [options.only] if options.only else MEASURES:
        rows = MEASURES[name](options.rounds)
        print_rows(rows)
        record = {"machine": machine, "rounds": options.rounds, "rows": [asdict(row) for row in rows]}
        (options.out / f"{name}.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        (options.out / f"{name}.md").write_text(format_markdown(rows, machine))
        if name == "wrappers":
            save_scaling(wrapper_points(rows), options.out / "wrappers.png")


if __name__ == "__main__":
    main()
