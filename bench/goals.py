"""Compares measured figures with this project's goals.

    python -m bench.goals                                   # the results in bench/results
    python -m bench.goals old                               # the results of another run

`make bench` runs this at its end. It measures nothing: it reads the files that `make bench` and `make bench-gpu` wrote,
as far as they exist, and writes `goals.md` to the same folder. The exit status is 1 if a figure misses its goal.

*Growth* is the cost of one more wrapped argument, divided by the cost of its two inner tensors as arguments of stock
`torch.compile`. A cost is the slope between the smallest and the largest number of arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from bench import (
    dtensors,
    floor,
    int8_sizes,
    long_rows,
    memory,
    starts,
)
from bench.gpu.report import OF_BUCKETS, OF_FILL, OF_FLOOR
from bench.gpu.stages import calls, int8, model, padded, training
from bench.modules import CHECKS
from bench.report import MICROSECONDS, Row, load_rows, wide_console

RESULTS = Path(__file__).parent / "results"
MODES = ("inference", "training")
DIRECT, BACKEND, STOCK = "desugar.compile", 'torch.compile(backend="desugar")', "torch.compile"
OVER_STOCK = {"inference": {1: 0.22, 5: 0.29, 20: 0.34}, "training": {1: 0.3, 5: 0.38, 20: 0.43}}
OVER_PLAIN = {"inference": 0.95, "training": 0.58}
BEHIND_DYNAMO = {"inference": 0.45, "training": 0.52}
OF_MODULES = {
    f"396 parameters, {CHECKS}": 0.8,
    f"12 layers, int8 weights, {CHECKS}": 0.45,
    "12 layers, int8 weights, with Inductor, batch 1": 0.45,
    "12 layers, int8 weights, with Inductor, batch 4": 0.45,
    "12 layers, int8 weights, with Inductor, batch 8": 0.45,
}
PUBLISHED = {5: 5.5, 10: 9.5, 20: 16.9, 50: 33.1}  # times faster than an isinstance loop
# Int8 layers of 4096 by 4096 over layers of floats, in inference; torchao's is the other bound at every batch.
INT8_OVER_FLOATS = {
    "weight-only": {1: 0.6, 16: 1.05, 256: 1.05},
    "dynamic": {1: 0.4, 16: 1.05, 256: 1.05},
}
INT8_OVER_TORCHAO, INT8_DECODE = 1.1, 0.7
# The time of a training step over long rows, relative to a dense table in the same way or compiled by stock.
LONG_ROWS = {
    "PaddedTensor, eager": ("/ dense, eager", 1.5),
    f"PaddedTensor, {DIRECT}": ("/ dense, torch.compile", 1.05),
    f"PaddedTensor, by length, {DIRECT}": ("/ dense, torch.compile", 0.5),
    f"JaggedTensor, {DIRECT}": ("/ dense, torch.compile", 0.3),
}
DTENSORS_OVER_STOCK = 0.3
JAGGED_OVER_VARLEN = 1.05  # a training step on a GPU
# Wall time of a warm start over stock's.
WARM_STARTS = {
    "x * 2, inference": 0.8,
    "x * 2, training": 0.8,
    "20 ops, training": 0.8,
    "int8 MLP of 12 layers, inference": 1.0,
    "ragged language model, a training step": 1.0,
}
WARM_BEHIND_DYNAMO, COLD_WITH_STORE, COLD_START = 1.1, 1.05, 0.9
# Seconds over torch. The second is of both packages; a collection of torch's objects falls due in either.
IMPORT_SECONDS = {"desugar": 0.15, "subclasses.ragged": 0.15 + 0.1}
# Tables whose rows do the same work: before compiled code, only our row checks for lazy negation.
COMPARED = ("in isolation", "the whole prologue")


@dataclass(frozen=True)
class Goal:
    """A figure and its goal.

    Attributes:
        name: The measured subject.
        wanted: The goal.
        measured: The figure.
        at_least: Whether the goal is a lower bound; otherwise it is an upper bound.
        exactly: Whether the figure has to equal the goal.
    """

    name: str
    wanted: float
    measured: float
    at_least: bool = False
    exactly: bool = False

    @property
    def is_reached(self) -> bool:
        """Whether the figure, rounded to two decimals as in the table, meets the goal."""
        measured = round(self.measured, 2)
        if self.exactly:
            return measured == self.wanted
        return measured >= self.wanted if self.at_least else measured <= self.wanted

    def cells(self) -> tuple[str, str, str, str]:
        """Returns the cells of a table row."""
        bound = "exactly" if self.exactly else "at least" if self.at_least else "at most"
        return (
            self.name,
            f"{bound} {self.wanted:g}",
            f"{self.measured:.2f}",
            "" if self.is_reached else "missed",
        )


# ---------------------------------------------------------------------------------------------------------
# figures
# ---------------------------------------------------------------------------------------------------------


def find_goals(results: Path) -> list[Goal]:
    """Returns the goals of all figures in a folder of results."""
    goals: list[Goal] = []
    for name, read in READERS.items():
        path = results / f"{name}.json"
        if path.exists():
            goals += read(load_rows(path)[0])
    return goals


def _wrappers(rows: list[Row]) -> Iterator[Goal]:
    by_name = {(row.group, row.name): row for row in rows}
    for mode, wanted in OVER_STOCK.items():
        for count, most in wanted.items():
            row = by_name.get((f"{mode}, N = {count}", f"TwoTensor, {DIRECT}"))
            if row is not None:
                ratio = row.ratios["/ stock, TwoTensor"]
                yield Goal(f"desugar.compile / stock on TwoTensor, {mode}, N = {count}", most, ratio)
    for mode in MODES:
        group = f"{mode}, N = 20"
        if (group, f"TwoTensor, {DIRECT}") not in by_name:
            continue
        direct, backend = (by_name[group, f"TwoTensor, {way}"].ratios for way in (DIRECT, BACKEND))
        name = f"desugar.compile, N = 20 / stock on the 40 plain tensors, {mode}"
        yield Goal(name, OVER_PLAIN[mode], direct["/ stock, plain"])
        yield Goal(f"{BACKEND} / stock, N = 20, {mode}", BEHIND_DYNAMO[mode], backend["/ stock, TwoTensor"])
        for kind in ("TwoTensor", "declared"):
            growth = _slope(rows, mode, f"{kind}, {DIRECT}") / _slope(rows, mode, floor.PLAIN)
            yield Goal(f"growth per wrapped argument over two plain ones, {mode}, {kind}", 1.2, growth)


def _floor(rows: list[Row]) -> Iterator[Goal]:
    """Yields the growth of the lower bound: if it misses the goal, every call does."""
    growth = _slope(rows, "inference", floor.FLOOR) / _slope(rows, "inference", floor.PLAIN)
    yield Goal("growth of the floor itself over two plain ones, inference", 1.2, growth)


def _modules(rows: list[Row]) -> Iterator[Goal]:
    for row in rows:
        if row.name == DIRECT and row.group in OF_MODULES:
            yield Goal(f"desugar.compile / stock, {row.group}", OF_MODULES[row.group], row.ratios["/ stock"])


def _slope(rows: list[Row], mode: str, name: str) -> float:
    """Returns the microseconds that one more argument costs."""
    points = sorted(
        (int(row.group.rpartition(" ")[2]), row.timing.median)
        for row in rows
        if row.group.startswith(f"{mode}, N = ") and row.name == name
    )
    (first, low), *_, (last, high) = points
    return (high - low) / (last - first)


def _seed(rows: list[Row]) -> Iterator[Goal]:
    for row in rows:
        title, _, rest = row.group.rpartition(", ")
        if "/ generated" not in row.ratios or row.ratios["/ generated"] == 1:
            continue
        if title not in COMPARED:  # one row makes a check that the other skips
            continue
        name = f"times faster than the {row.name}, {title}, {rest}"
        yield Goal(name, PUBLISHED[int(rest.split()[0])], row.ratios["/ generated"], at_least=True)


def _compiling(rows: list[Row]) -> Iterator[Goal]:
    for row in rows:
        if row.group.startswith("cold start") and row.name == DIRECT:
            yield Goal(f"desugar.compile / stock, {row.group}", COLD_START, row.ratios["/ stock"])


def _memory(rows: list[Row]) -> Iterator[Goal]:
    """Yields the bytes kept per call: below one byte nothing is kept, since any object has dozens."""
    for row in rows:
        if row.group.startswith(memory.GROWTH) and row.name == DIRECT:
            mode = row.group.rpartition(", ")[2]
            yield Goal(
                f"bytes kept by a call of desugar.compile, {mode}", 1, row.timing.median / memory.CALLS
            )


def _int8(rows: list[Row]) -> Iterator[Goal]:
    for row in rows:
        if row.name == int8.WEIGHT_ONLY and row.group.startswith("int8, M = 1,"):
            limit = (
                OF_FLOOR if OF_FLOOR in row.ratios else "limit / this"
            )  # the first run had a copy as its limit
            faster, of_limit = 1 / row.ratios[f"/ {int8.PLAIN}"], row.ratios[limit]
            yield Goal(f"weight-only decode, times faster than bf16, {row.group}", 1.7, faster, at_least=True)
            yield Goal(f"weight-only decode, share of the limit, {row.group}", 0.8, of_limit, at_least=True)


def _int8_sizes(rows: list[Row]) -> Iterator[Goal]:
    """Yields the goals of large layers and of a decode step, for either compiler."""
    for row in rows:
        kind, _, compiler = row.name.rpartition(", ")
        if kind not in INT8_OVER_FLOATS or compiler not in int8_sizes.COMPILERS:
            continue
        _, size, batch, mode, *_ = [*row.group.split(", "), "", ""]
        if size == "4096 by 4096" and mode == "inference":
            most = INT8_OVER_FLOATS[kind][int(batch.removeprefix("batch "))]
            yield Goal(f"int8 / floats, {row.group}, {compiler}", most, row.ratios["/ floats"])
            if "/ torchao" in row.ratios:
                name = f"int8 / torchao, {row.group}, {compiler}"
                yield Goal(name, INT8_OVER_TORCHAO, row.ratios["/ torchao"])
        elif row.group.startswith(f"{int8_sizes.DECODE}, bfloat16"):
            yield Goal(f"int8 / floats, {row.group}, {compiler}", INT8_DECODE, row.ratios["/ floats"])


def _long_rows(rows: list[Row]) -> Iterator[Goal]:
    for row in rows:
        if row.name in LONG_ROWS:
            heading, most = LONG_ROWS[row.name]
            yield Goal(f"{row.name} {heading}, {row.group}", most, row.ratios[heading])


def _dtensors(rows: list[Row]) -> Iterator[Goal]:
    for row in rows:
        if row.name == DIRECT:
            heading = f"{DIRECT} / stock on DTensors, {row.group}"
            yield Goal(heading, DTENSORS_OVER_STOCK, row.ratios["/ torch.compile"])


def _starts(rows: list[Row]) -> Iterator[Goal]:
    """Yields the goals of wall times, with the store of programs on."""
    imported, seconds = [], 0.0
    for row in rows:
        start, _, case = row.group.removesuffix(", wall").partition(" start, ")
        if row.group == f"{starts.IMPORTS}, wall" and row.name in IMPORT_SECONDS:
            imported.append(row.name)
            seconds += row.timing.median / 1e3
            yield Goal(f"import {', '.join(imported)}, seconds over torch", IMPORT_SECONDS[row.name], seconds)
        elif not row.group.endswith(", wall") or row.name not in (DIRECT, BACKEND):
            continue
        elif start == "warm":
            most = WARM_STARTS[case] if row.name == DIRECT else WARM_BEHIND_DYNAMO
            yield Goal(f"{row.name} / stock, {start} start, {case}", most, row.ratios["/ stock"])
        elif start == "cold":
            if row.name == DIRECT:
                yield Goal(f"{row.name} / stock, first start, {case}", COLD_START, row.ratios["/ stock"])
            if starts.WITHOUT in row.ratios:
                name = f"{row.name}, with the store {starts.WITHOUT}, cold start, {case}"
                yield Goal(name, COLD_WITH_STORE, row.ratios[starts.WITHOUT])


def _padded(rows: list[Row]) -> Iterator[Goal]:
    for row in rows:
        if row.name != padded.BUCKETS:
            continue
        if row.unit == padded.GRAPHS_RECORDED:
            yield Goal(f"graphs recorded / buckets, {row.group}", 1, row.ratios[OF_BUCKETS], exactly=True)
        elif row.unit == MICROSECONDS:
            faster = 1 / row.ratios[f"/ {padded.DYNAMIC}"]
            yield Goal(
                f"buckets, times faster than torch.compile(dynamic=True), {row.group}",
                3,
                faster,
                at_least=True,
            )


def _uneven(rows: list[Row]) -> Iterator[Goal]:
    for row in rows:
        if row.name == model.JAGGED and OF_FILL in row.ratios:
            yield Goal(f"JaggedTensor / (dense * fill), {row.group}", 1.15, row.ratios[OF_FILL])


def _training(rows: list[Row]) -> Iterator[Goal]:
    for row in rows:
        heading = f"/ {training.BY_HAND}"
        if (
            row.name == training.JAGGED
            and row.group.startswith("training, 2048 wide")
            and heading in row.ratios
        ):
            yield Goal(f"JaggedTensor {heading}, {row.group}", JAGGED_OVER_VARLEN, row.ratios[heading])


def _events(rows: list[Row]) -> Iterator[Goal]:
    counts = {(row.group, row.name): row.timing.median for row in rows if row.unit == calls.CALLS}
    for (group, name), count in counts.items():
        if not name.startswith("plain"):
            plain = counts[group, f"plain, {DIRECT}"]
            yield Goal(f"{group}, {name}, as on plain tensors", plain, count, exactly=True)


READERS: dict[str, Callable[[list[Row]], Iterator[Goal]]] = {
    "wrappers": _wrappers,
    "modules": _modules,
    "floor": _floor,
    "seed": _seed,
    "memory": _memory,
    "compiling": _compiling,
    int8_sizes.NAME: _int8_sizes,
    long_rows.NAME: _long_rows,
    dtensors.NAME: _dtensors,
    starts.NAME: _starts,
    "gpu-int8": _int8,
    "gpu-padded": _padded,
    "gpu-rows": _uneven,
    "gpu-model": _uneven,
    "gpu-training": _training,
    "gpu-events": _events,
}

# ---------------------------------------------------------------------------------------------------------
# showing
# ---------------------------------------------------------------------------------------------------------

HEADINGS = ("", "wanted", "measured", "")


def format_markdown(goals: list[Goal]) -> str:
    """Returns the table in Markdown."""
    lines = [f"| {' | '.join(HEADINGS)} |", "|---|---:|---:|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(goal.cells())} |" for goal in goals)]) + "\n"


def show_goals(results: Path) -> bool:
    """Prints the table of a folder's figures and writes `goals.md` there; returns whether all goals are reached."""
    goals = find_goals(results)
    table = Table(*HEADINGS)
    for goal in goals:
        table.add_row(*goal.cells())
    if goals:
        wide_console().print(table)
        (results / "goals.md").write_text(format_markdown(goals))
    return all(goal.is_reached for goal in goals)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS, help="a folder of results")
    results = parser.parse_args().results
    if not find_goals(results):
        files = ", ".join(f"{name}.json" for name in READERS)
        parser.error(f"expected a folder with one of {files}, got {results}")
    return 0 if show_goals(results) else 1


if __name__ == "__main__":
    sys.exit(main())
