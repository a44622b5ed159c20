"""Runs all CPU benchmarks; prints tables, and writes JSON, Markdown and plots to `bench/results/`.

    python -m bench.compare                     # all benchmarks, some minutes
    python -m bench.compare --quick             # fewer sizes and rounds
    python -m bench.compare --only layers       # eager mode only, seconds

Each table runs in a process of its own with one thread, so that no table depends on an earlier one. Compilation and
the first calls are not timed, unless the table is about them. Each figure is the median over the rounds; for modules,
over the fastest tenth of the turns. Its spread is half the distance between the quartiles.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from bench import compiling, floor, kinds, layers, layouts, memory, modules, programs, seed
from bench.goals import show_goals
from bench.int8_sizes import time_fastest
from bench.plots import Point, save_scaling
from bench.report import Row, print_rows, save_rows
from bench.subjects import COUNTS, MODES, SUBJECTS, Subject
from bench.timing import Timing, describe_machine, time_side_by_side

RESULTS = Path(__file__).parent / "results"
OURS = ("declared", "desugar", "generated", "PaddedTensor", "JaggedTensor")


@dataclass(frozen=True)
class Effort:
    """The number of rounds, and whether sizes are skipped."""

    rounds: int
    quick: bool


def is_ours(name: str) -> bool:
    """Whether a row measures this project; eager mode of a hand-written class does not."""
    return any(word in name for word in OURS)


def rows_of(group: str, timings: Mapping[str, Timing], **references: str) -> list[Row]:
    """Returns the rows of one table.

    Args:
        group: The table.
        timings: Name of a row -> timing.
        references: Heading of a ratio -> name of the row to divide by.
    """
    return [
        Row(
            group,
            name,
            timing,
            {heading: timing.median / timings[of].median for heading, of in references.items()},
            ours=is_ours(name),
        )
        for name, timing in timings.items()
    ]


def print_progress(text: str) -> None:
    Console(stderr=True).print(text)


# ---------------------------------------------------------------------------------------------------------
# calls
# ---------------------------------------------------------------------------------------------------------


def measure_wrappers(effort: Effort) -> list[Row]:
    """Times the subjects of each mode and count, relative to stock `torch.compile` on each kind."""
    rows = []
    chosen = [s for s in SUBJECTS if not effort.quick or s.count in (1, 20)]
    for (mode, count), subjects in groupby(chosen, key=lambda s: (s.mode, s.count)):
        torch.compiler.reset()
        calls = {
            s: s.build() for s in track(list(subjects), f"{mode}, N = {count}", console=Console(stderr=True))
        }
        timings = time_side_by_side(calls, rounds=effort.rounds, round_ms=0.5)
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
    return Row(group, f"{subject.kind}, {subject.way}", timing, ratios, ours=is_ours(subject.way))


def measure_kinds(effort: Effort) -> list[Row]:
    """Times int8 weights, padded and jagged rows in each mode and count, relative to stock `torch.compile`."""
    rows = []
    for family, (mode, count) in product(kinds.FAMILIES, product(MODES, (1, 20) if effort.quick else COUNTS)):
        torch.compiler.reset()
        print_progress(group := f"{family}, {mode}, N = {count}")
        timings = time_side_by_side(kinds.make_calls(family, mode, count), rounds=effort.rounds, round_ms=0.5)
        stock = {kind: timing.median for (kind, way), timing in timings.items() if way == "torch.compile"}
        for (kind, way), timing in timings.items():
            ratios = {
                f"/ stock, {heading}": timing.median / stock[of]
                for heading, of in (("same kind", kind), ("plain", "plain"))
                if of in stock
            }
            rows.append(Row(group, f"{kind}, {way}", timing, ratios, ours=is_ours(way)))
    return rows


def measure_layouts(effort: Effort) -> list[Row]:
    """Times int8 weights and ragged rows, relative to stock `torch.compile` on a plain tensor of that size."""
    rows = []
    for name, make in list(layouts.SUBJECTS.items())[:: 2 if effort.quick else 1]:
        for mode in MODES:
            torch.compiler.reset()
            print_progress(f"{name}, {mode}")
            timings = time_side_by_side(make(mode), rounds=effort.rounds)
            named = {f"{kind}, {way}": timing for (kind, way), timing in timings.items()}
            first = next(iter(named)).split(",")[0]
            rows += rows_of(f"{name}, {mode}", named, **{"/ stock, plain": f"{first}, torch.compile"})
    return rows


def measure_modules(effort: Effort) -> list[Row]:
    """Times modules with many layers, relative to stock `torch.compile` on the same module: the fastest tenth."""
    rows = []
    for name in modules.SUBJECTS:
        torch.compiler.reset()
        print_progress(name)
        timings = time_fastest(modules.make_calls(name), effort.rounds / 40)
        rows += rows_of(name, timings, **{"/ stock": "torch.compile"})
    return rows


def measure_layers(effort: Effort) -> list[Row]:
    """Times operations in eager mode, relative to the first row of each group."""
    return _in_groups(layers.make_calls(), effort, "/ first")


def measure_floor(effort: Effort) -> list[Row]:
    """Times a call relative to its lower bound."""
    return _in_groups(floor.make_all(), effort, "/ the floor", floor.FLOOR)


def _in_groups(
    calls: Mapping[tuple[str, str], Callable], effort: Effort, heading: str, reference: str | None = None
) -> list[Row]:
    """Times calls; returns one table per group, with ratios to the row `reference` or to the first row."""
    with torch.no_grad():
        timings = time_side_by_side(calls, rounds=effort.rounds, round_ms=0.5)
    groups: dict[str, dict[str, Timing]] = defaultdict(dict)
    for (group, name), timing in timings.items():
        groups[group][name] = timing
    return [
        row
        for group, members in groups.items()
        for row in rows_of(group, members, **{heading: reference or next(iter(members))})
    ]


def measure_programs(effort: Effort) -> list[Row]:
    """Times calls of a function with several programs, relative to stock `torch.compile`."""
    rows = []
    with torch._dynamo.config.patch(recompile_limit=64):
        for count in programs.COUNTS:
            torch.compiler.reset()
            calls = programs.make_calls(count)
            with torch.no_grad():
                timings = time_side_by_side(calls, rounds=effort.rounds, round_ms=0.5)
            for (title, way), timing in timings.items():
                references = {"/ stock": (title, "torch.compile"), "/ one program": ("one program", way)}
                ratios = {name: timing.median / timings[of].median for name, of in references.items()}
                rows.append(Row(f"N = {count}", f"{title}, {way}", timing, ratios, ours=is_ours(way)))
    return rows


def measure_seed(effort: Effort) -> list[Row]:
    """Times the handling of saved tensors in a backward."""
    rows = []
    for title, make in seed.TABLES.items():
        for count in seed.COUNTS:
            calls = make(count)
            with torch.no_grad():
                timings = time_side_by_side(calls, rounds=effort.rounds, round_ms=0.5)
            rows += rows_of(f"{title}, {count} arguments", timings, **{"/ generated": "generated"})
    return rows


# ---------------------------------------------------------------------------------------------------------
# compiling, memory
# ---------------------------------------------------------------------------------------------------------


def measure_compiling(effort: Effort) -> list[Row]:
    """Measures the time to the end of the first call, and the time of each stage."""
    print_progress("compile time")
    results = compiling.measure_compiling(2 if effort.quick else 7)
    rows = []
    for fn, mode in dict.fromkeys((fn, mode) for fn, mode, _ in results):
        seconds = {w: times.cold for (f, m, w), times in results.items() if (f, m) == (fn, mode)}
        timings = {way: Timing.of([1e3 * s for s in samples]) for way, samples in seconds.items()}
        group = f"cold start, {fn}, {mode}"
        rows += [replace(row, unit="ms") for row in rows_of(group, timings, **{"/ stock": compiling.STOCK})]
    for (fn, mode, way), times in results.items():
        if way == compiling.DIRECT:
            timings = {name: Timing.of([1e3 * s for s in samples]) for name, samples in times.stages.items()}
            rows += [Row(f"where it goes, {fn}, {mode}", n, t, unit="ms") for n, t in timings.items()]
    return rows


def measure_memory(effort: Effort) -> list[Row]:
    """Measures bytes per instance and per program, and the growth over many calls."""
    print_progress("memory")
    rows = []
    instances = {name: memory.bytes_per_instance(make) for name, make in memory.make_instances().items()}
    for which in ("Python", "C++"):
        group = f"one more instance over the same inner tensors, {which}"
        rows += [_bytes(group, name, [amounts[which]]) for name, amounts in instances.items()]
    with torch._dynamo.config.patch(recompile_limit=64):
        for mode, (name, make) in product(MODES, memory.WAYS.items()):
            amount = memory.bytes_per_program(make, grad=mode == "training")
            rows.append(_bytes(f"one more program, {mode}", name, [amount]))
        for mode, (name, make) in product(MODES, memory.WAYS.items()):
            amounts = memory.growth_over_calls(make, grad=mode == "training")
            rows.append(_bytes(f"{memory.GROWTH}, {mode}", name, amounts))
    return rows


def _bytes(group: str, name: str, amounts: list[float]) -> Row:
    """Returns a row: one amount is bytes per instance or program, several are growth, which only a goal judges."""
    if len(amounts) > 1:
        return Row(group, name, Timing.of(amounts), unit="bytes")
    return Row(group, name, Timing(*amounts * 3), unit="bytes", ours=is_ours(name))


MEASURES: dict[str, Callable[[Effort], list[Row]]] = {
    "layers": measure_layers,
    "seed": measure_seed,
    "floor": measure_floor,
    "programs": measure_programs,
    "memory": measure_memory,
    "compiling": measure_compiling,
    "layouts": measure_layouts,
    "wrappers": measure_wrappers,
    "modules": measure_modules,
    "kinds": measure_kinds,
}

# ---------------------------------------------------------------------------------------------------------
# running
# ---------------------------------------------------------------------------------------------------------


PLOTTED = ("wrappers", "kinds")


def points_of(rows: list[Row]) -> list[Point]:
    """Converts the rows of `measure_wrappers` or `measure_kinds` to points of a plot."""
    points = []
    for row in rows:
        (panel, count), (kind, way) = row.group.split(", N = "), row.name.split(", ")
        points.append(Point(panel, int(count), kind, way, row.timing.median))
    return points


def main() -> None:
    """Runs the chosen benchmarks; prints the tables, and writes `NAME.json`, `NAME.md` and `goals.md`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=MEASURES, nargs="+", help="run only these")
    parser.add_argument("--rounds", type=int, help="default 100, quick 20")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.only is None or len(options.only) > 1:
        for name in options.only or MEASURES:
            subprocess.run([sys.executable, "-m", "bench.compare", *sys.argv[1:], "--only", name], check=True)
        show_goals(options.out)
        return
    effort = Effort(options.rounds or (20 if options.quick else 100), options.quick)
    torch.set_num_threads(1)
    # Hand-written classes lack a method that PyTorch's cache calls.
    warnings.filterwarnings("ignore", "\\w+ does not implement _stable_hash", UserWarning)
    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors", UserWarning)
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    machine: dict[str, Any] = describe_machine()
    (name,) = options.only
    rows = MEASURES[name](effort)
    print_rows(rows)
    save_rows(rows, machine, options.out / f"{name}.json", rounds=effort.rounds)
    if name in PLOTTED:
        save_scaling(points_of(rows), options.out / f"{name}.png")


if __name__ == "__main__":
    main()
