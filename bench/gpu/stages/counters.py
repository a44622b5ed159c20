"""Reads hardware counters of the kernel for 2 to 64 rows with Nsight Compute: bytes of L2 and of memory, stalls."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys

from bench.gpu.run import Absent, Run

GROUP = "int8, M = 16, N = K = 4096: hardware counters of one kernel"
METRICS = {
    "gpu__time_duration.sum": "time",
    "dram__bytes_read.sum": "bytes read from memory",
    "lts__t_bytes.sum": "bytes through L2",
    "lts__t_sectors_op_read_lookup_hit.sum": "sectors of 32 bytes read and found in L2",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps active, % of the most",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "cycles with an instruction issued, %",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": "warps that wait for memory, an issue",
}
TARGET = """
import torch
from subclasses.int8 import Int8Tensor
from subclasses.int8.matmul.cuda_products import int8_rows

w = Int8Tensor.from_float(torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16))
x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
for _ in range(3):
    int8_rows(x, w.qdata, w.scale, w.zero_point)
torch.cuda.synchronize()
"""


def measure_counters(run: Run) -> None:
    """Runs `ncu` on the third launch of the kernel, and writes its metrics.

    Raises:
        Absent: `ncu` is not on the PATH, or there is no CUDA device.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise Absent("expected ncu (Nsight Compute) on the PATH, found none")
    if run.device.name != "cuda":
        raise Absent("hardware counters need a CUDA device")
    command = [
        *(ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"),
        *("--kernel-name", "regex:int8_rows", "--launch-skip", "2", "--launch-count", "1"),
        *("--metrics", ",".join(METRICS), sys.executable, "-c", TARGET),
    ]
    text = run.attempt(GROUP, "ncu", lambda: _output(command))
    for name, (value, unit) in parse_counters(text or "").items():
        run.number(GROUP, "int8_rows", name, value, unit)


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=35)
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise RuntimeError(
            next((line for line in lines if "==ERROR==" in line), f"exit status {done.returncode}")
        )
    return done.stdout


def parse_counters(text: str) -> dict[str, tuple[float, str]]:
    """Returns the values and units of ncu's raw page, as CSV: a heading, a row of units, and a row for each launch."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if len(lines) < 3:
        return {}
    headings, units, values = (next(csv.reader([line])) for line in (lines[0], lines[1], lines[-1]))
    row = dict(zip(headings, zip(values, units, strict=True), strict=True))
    return {
        name: (float(row[metric][0].replace(",", "")), row[metric][1])
        for metric, name in METRICS.items()
        if metric in row and row[metric][0] not in ("", "n/a")
    }
