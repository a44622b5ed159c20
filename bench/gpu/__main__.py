"""The command: `python -m bench.gpu`. It imports no torch; see the package for its uses."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.gpu import wheels
from bench.gpu.driver import Driver, stage_command
from bench.gpu.lines import Line, read_lines
from bench.gpu.table import BY_NAME, STAGES

FOLDER = Path("build/bench-gpu")
BUDGET = 560.0
PATIENCE = 4.0  # a rehearsal may share its few cores
NO_CUDA = (
    "expected a CUDA device and a PyTorch that sees it, found none: nothing was measured, nothing was written"
)


def show(line: Line) -> None:
    """Prints a line for a person to follow."""
    label = ": ".join(filter(None, [line.stage, line.group, line.subject]))
    if line.error or line.state:
        print(f"{label}: {line.state} {line.error}".rstrip(), flush=True)
    elif line.value is not None:
        print(f"{label}: {line.figure} {line.value:,.2f} {line.unit}", flush=True)
    else:
        print(f"{label}: {line.text}", flush=True)


def has_cuda() -> bool:
    """Returns whether another process finds a CUDA device; the search may take long, or hang."""
    text = "import torch; raise SystemExit(not torch.cuda.is_available())"
    try:
        return (
            subprocess.run(
                [sys.executable, "-c", text], capture_output=True, check=False, timeout=60
            ).returncode
            == 0
        )
    except subprocess.TimeoutExpired:
        return False


def write_report(path: Path, out: Path | None) -> int:
    """Writes the report in a process of its own, which imports torch."""
    command = [sys.executable, "-m", "bench.gpu.report", str(path)]
    return subprocess.run([*command, *(["--out", str(out)] if out else [])], check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 without CUDA, in which case nothing is written."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(description="Measures on a GPU, stage by stage.")
    parser.add_argument("--only", choices=BY_NAME, nargs="+", help="these stages, behind `basics`")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds of the whole run")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of lines, logs, wheels and caches")
    parser.add_argument("--fresh", action="store_true", help="forgets the lines of earlier runs")
    parser.add_argument("--rehearse", action="store_true", help="every stage on the CPU, with small sizes")
    parser.add_argument("--any-torch", action="store_true", help="tries the library on an older PyTorch")
    parser.add_argument("--back", type=Path, help="a folder that gets lines, report and caches, too")
    parser.add_argument("--out", type=Path, help="the folder of the report; default: bench/results")
    parser.add_argument(
        "--report", type=Path, metavar="LINES", help="writes the report of a file, measures nothing"
    )
    options = parser.parse_args(arguments)
    if options.report:
        return write_report(options.report, options.out)
    if not options.rehearse and not has_cuda():
        print(NO_CUDA, file=sys.stderr)
        return 2
    return measure(options, started)


def measure(options: argparse.Namespace, started: float) -> int:
    """Runs the stages and writes the report."""
    more = ["--any-torch"] if options.any_torch else []
    driver = Driver(
        options.folder,
        options.budget,
        stage_command(options.folder, options.rehearse, more),
        rehearsal=options.rehearse,
        copy=options.back / "lines.jsonl" if options.back else None,
        show=show,
        patience=PATIENCE if options.rehearse else 1.0,
        started=started,
    )
    if options.fresh:
        driver.path.unlink(missing_ok=True)
    if options.back:
        options.back.mkdir(parents=True, exist_ok=True)
    wheels.prepare(options.folder)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the stage, too
    chosen = [stage for stage in STAGES if not options.only or stage.name in options.only]
    driver.run(chosen if chosen[0] is STAGES[0] else [STAGES[0], *chosen])
    if not read_lines(driver.path):
        return 1
    # A rehearsal runs on the CPU, so its figures never get among the results.
    out = options.folder / "rehearsal" if options.rehearse else options.out
    status = write_report(driver.path, out)
    if options.back:
        wheels.pack(options.folder, options.back)
    return status


if __name__ == "__main__":
    sys.exit(main())
