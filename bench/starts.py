"""Benchmarks starts: the time of a fresh process until its first result, with cold and with warm caches.

    python -m bench.starts                      # about an hour; writes bench/results/starts.*
    python -m bench.starts --turns 3 --cases "20 ops, training"
    python -m bench.starts --store on           # only with caches of programs: half an hour
    python -m bench.starts --lazy               # a start imports modules where it needs them, and the imports are timed

A *cold start* is a process with an empty cache directory. A *warm start* is a second process, with the directory that
the cold one left behind. Each turn makes both, for every case and way, in a new random order. Stock's and ours are
separate processes with separate directories, which share nothing.

Both compilers keep programs for later processes: desugar in its store, stock in AOTAutograd's cache. *Without the
store* each starts once more with that cache off (``DESUGAR_STORE=0``, ``TORCHINDUCTOR_AUTOGRAD_CACHE=0``). Inductor's
cache of kernels stays on.

`bench.one_start` defines the timed part. A first turn, which is not timed, lists the modules that each start imports,
and leaves their byte code in a folder of its own. In the other turns a process imports them before the start, and
*imports* is the time of that.

*Wall* is the time that the user waits for the start itself. *Cpu* is the processor time of the process and its
children, mostly compilers. *Graph* is the part of the wall time after Dynamo has made its graph. A store that keeps
more of a program could save this part at most.

`--cases none` times the imports of our packages alone; *collecting* is the part in the garbage collector.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.one_start import BACKEND, CASES, DIRECT, PACKAGES, STOCK
from bench.report import Row, load_rows, print_rows, save_rows
from bench.timing import Timing, describe_machine, environment_with_byte_code

ROOT = Path(__file__).parents[1]
# Imports are timed with byte code, as for installed packages, whatever the environment says.
BYTE_CODE = Path(tempfile.gettempdir()) / "desugar-bench-byte-code"
RESULTS = Path(__file__).parent / "results"
NAME = "starts"
STARTS, CLOCKS = ("cold", "warm"), ("wall", "cpu", "graph", "imports")
IMPORT_CLOCKS = ("wall", "cpu", "collecting")
UNITS = {"wall": "ms, wall", "cpu": "ms, CPU", "graph": "ms, wall, of that"}
UNITS |= {"imports": "ms, wall, before", "collecting": "ms, CPU"}
SWITCHES = ("DESUGAR_STORE", "TORCHINDUCTOR_AUTOGRAD_CACHE")
IMPORTS = "imports, each after those above it"
OFF, WITHOUT, ALIKE = ", without the store", "/ without the store", "/ stock with as many caches"


@dataclass(frozen=True)
class Way:
    """A compiler, with its cache of programs or without it."""

    compiler: str
    stored: bool = True

    @property
    def name(self) -> str:
        """The name of the row."""
        return self.compiler if self.stored else self.compiler + OFF


Samples = dict[tuple[str, str, str, str], list[float]]  # start, case, way, clock -> milliseconds


def ways_of(store: str) -> list[Way]:
    """Returns the ways to measure: stock's, and ours with the store on, off, or both; stock's cache is also on."""
    switched = {"on": (True,), "off": (False,), "both": (True, False)}[store]
    ways = [Way(way, stored) for way in (STOCK, BACKEND, DIRECT) for stored in switched]
    return ways if store != "off" else [Way(STOCK), *ways]


# ---------------------------------------------------------------------------------------------------------
# measuring
# ---------------------------------------------------------------------------------------------------------


def run_process(arguments: Sequence[str], cache: Path, stored: bool = True) -> Any:
    """Runs `bench.one_start` in a fresh process with a cache directory; returns the JSON that it prints.

    Raises:
        RuntimeError: The process failed.
    """
    environment = environment_with_byte_code(BYTE_CODE)
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    for switch in SWITCHES:
        environment.pop(switch, None)
        if not stored:
            environment[switch] = "0"
    command = [sys.executable, "-m", "bench.one_start", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_starts(turns: int, cases: Sequence[str], ways: Sequence[Way], *, lazy: bool = False) -> Samples:
    """Returns the milliseconds of each turn; `lazy` leaves imports to the starts."""
    samples: Samples = defaultdict(list)
    chosen = [(case, way) for case in cases for way in ways]
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as lists:
        paths = {
            pair: [Path(lists, f"{n}-{start}.json") for start in STARTS] for n, pair in enumerate(chosen)
        }
        for pair in chosen:
            for path, measured in zip(paths[pair], _start_twice(*pair), strict=True):
                path.write_text(json.dumps(measured["modules"]))
        for _ in range(turns):
            rng.shuffle(chosen)
            for case, way in chosen:
                given = () if lazy else paths[case, way]
                for start, measured in zip(STARTS, _start_twice(case, way, given), strict=True):
                    for clock in CLOCKS:
                        samples[start, case, way.name, clock].append(1e3 * measured[clock])
    return samples


def _start_twice(case: str, way: Way, lists: Sequence[Path] = ()) -> list[Any]:
    """Makes a cold and a warm start; each first imports the modules of its list."""
    with tempfile.TemporaryDirectory() as folder:
        return [
            run_process([case, way.compiler, *map(str, lists[n : n + 1])], Path(folder), way.stored)
            for n in range(len(STARTS))
        ]


def measure_imports(turns: int) -> list[Row]:
    """Returns the rows of imports: each package is imported after the packages before it."""
    samples = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        run_process(["imports"], Path(folder))  # the first one may still write byte code
        for _ in range(turns):
            for package, seconds in run_process(["imports"], Path(folder)).items():
                for clock in IMPORT_CLOCKS:
                    samples[package, clock].append(1e3 * seconds[clock])
    return [
        Row(
            f"{IMPORTS}, {clock}",
            package,
            _timing(samples[package, clock]),
            unit=UNITS[clock],
            ours=package != "torch",
        )
        for clock in IMPORT_CLOCKS
        for package in PACKAGES
    ]


# ---------------------------------------------------------------------------------------------------------
# rows
# ---------------------------------------------------------------------------------------------------------


def _timing(samples: list[float]) -> Timing:
    return Timing.of(samples) if len(samples) > 1 else Timing(*samples * 3)


def rows_of(samples: Samples, cases: Sequence[str], ways: Sequence[Way]) -> list[Row]:
    """Returns a table for each start, case and clock, relative to stock; and, if measured, to no store."""
    rows = []
    for start in STARTS:
        for case in cases:
            for clock in CLOCKS:
                timings = {way: _timing(samples[start, case, way.name, clock]) for way in ways}
                rows += [
                    Row(
                        f"{start} start, {case}, {clock}",
                        way.name,
                        timing,
                        _ratios(way, timings),
                        unit=UNITS[clock],
                        ours=way.compiler != STOCK,
                    )
                    for way, timing in timings.items()
                ]
    return rows


def _ratios(way: Way, timings: dict[Way, Timing]) -> dict[str, float]:
    ratios = {"/ stock": timings[way].median / timings[Way(STOCK)].median}
    switched = {w.stored for w in timings if w.compiler == DIRECT}
    if switched == {True, False}:  # a column is of all rows of a table
        ratios[WITHOUT] = timings[way].median / timings[Way(way.compiler, False)].median
    if False in switched:
        ratios[ALIKE] = timings[way].median / timings[Way(STOCK, way.stored)].median
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=7, help="how often each start is made, default 7")
    parser.add_argument("--cases", nargs="+", choices=[*CASES, "none"], default=list(CASES))
    parser.add_argument("--store", choices=("on", "off", "both"), default="both")
    parser.add_argument("--lazy", action="store_true", help="imports are part of the starts")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--add", action="store_true", help="keep the tables of the file that are not measured now"
    )
    options = parser.parse_args()
    cases, ways = [case for case in options.cases if case != "none"], ways_of(options.store)
    rows = measure_imports(options.turns)
    rows += rows_of(measure_starts(options.turns, cases, ways, lazy=options.lazy), cases, ways)
    print_rows(rows)
    path = options.out / f"{NAME}.json"
    if options.add and path.exists():
        measured = {row.group for row in rows}
        rows = [row for row in load_rows(path)[0] if row.group not in measured] + rows
    save_rows(rows, describe_machine(), path, command=f"bench.{NAME}", turns=options.turns)


if __name__ == "__main__":
    main()
