"""Compiles the subjects of all other stages, in parallel, into the caches on disk. Nothing is timed."""

from __future__ import annotations

import subprocess
import sys
import time

from bench.gpu.run import Run
from bench.gpu.table import STAGES


def compile_all(run: Run) -> None:
    """Runs each stage in processes that compile only; says how long each took, and which were ended."""
    seconds = run.device.pick(70.0, 60.0)
    started = time.monotonic()
    processes = {
        f"{stage.name}, part {k + 1} of {stage.shards}": _start(run, stage.name, k, stage.shards)
        for stage in STAGES
        for k in range(
            run.device.pick(stage.shards, 0)
        )  # a rehearsal has few cores, and nothing to compile ahead
    }
    logs = run.folder / "logs"
    for name, process in processes.items():
        try:
            code = process.wait(max(0.0, seconds - (time.monotonic() - started)))
        except subprocess.TimeoutExpired:
            process.kill()
            run.line("compiled", name, error=f"ended after {seconds:.0f} s")
            continue
        if code:
            run.line("compiled", name, error=f"exit status {code}; its log is in {logs.name}")
        else:
            run.number("compiled", name, "time", time.monotonic() - started, "s at most")


def _start(run: Run, stage: str, shard: int, shards: int) -> subprocess.Popen[bytes]:
    log = run.folder / "logs" / f"warm-{stage}-{shard}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    arguments = ["--folder", str(run.folder), "--shard", str(shard), str(shards)]
    arguments += ["--any-torch"] if run.any_torch else []
    arguments += ["--rehearse"] if run.device.rehearsal else []
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "bench.gpu.stage", stage, *arguments], stdout=output, stderr=output
        )
