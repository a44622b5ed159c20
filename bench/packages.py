"""Times packages: loading one in a fresh process, and a call beside the same function compiled.

    python -m bench.packages --out bench/results/packages.json

Loads and calls are measured in processor time, since nothing in them waits. On a shared machine it varies less than
wall time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import desugar
from bench.timing import describe_machine, environment_with_byte_code
from subclasses.int8 import Int8WeightOnlyConfig, quantize_
from subclasses.ragged import JaggedTensor

TURNS = 7
MEASURED = "`python -m bench.packages` measures it."
CALLS = 2000

# Prints milliseconds of a process: for importing the modules that packages need, and for loading a package twice.
LOADING = """
import importlib, sys, time
import torch, desugar, subclasses.ragged, subclasses.int8
times = []
for step in (lambda: importlib.import_module("desugar.packages.load"), *[lambda: desugar.load(sys.argv[1])] * 2):
    start = time.process_time()
    step()
    times.append((time.process_time() - start) * 1e3)
print(*times)
"""


def make_cases() -> dict[str, tuple[nn.Module, Tensor]]:
    """The functions that are measured, each with its argument."""
    mlp = [nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(12))) for _ in range(2)]
    quantize_(mlp[1], Int8WeightOnlyConfig())
    rows = JaggedTensor.from_tensors([torch.randn(n, 64) for n in (3, 7, 5)])
    return {
        "12 layers, plain": (mlp[0], torch.randn(4, 64)),
        "12 layers, int8": (mlp[1], torch.randn(4, 64)),
        "12 layers on rows": (mlp[0], rows),
        "396 parameters": (Scales(396), torch.randn(4)),
    }


class Scales(nn.Module):
    """Scales by one parameter after another, so that most of a call is the handling of parameters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(4)) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        """Scales a tensor of size (4,)."""
        for scale in self.scales:
            x = x * scale
        return x


def time_in_turns(ways: dict[str, Callable[[Tensor], Any]], x: Tensor) -> dict[str, float]:
    """Microseconds a call: the median of turns that the ways take one after the other."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, fn in ways.items():
            start = time.process_time()
            for _ in range(CALLS // TURNS):
                fn(x)
            samples[name].append((time.process_time() - start) / (CALLS // TURNS) * 1e6)
    return {name: round(statistics.median(times), 2) for name, times in samples.items()}


def time_loading(path: Path) -> list[float]:
    """Milliseconds of imports, of the first load in a process, and of the second: medians over fresh processes.

    Byte code is kept, as it is of installed packages; the process that writes it does not count.
    """
    environment = environment_with_byte_code(path.parent / "byte_code")
    command = [sys.executable, "-c", LOADING, str(path)]
    runs = []
    for _ in range(TURNS + 1):
        made = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        runs.append([float(text) for text in made.stdout.split()])
    runs = runs[1:]
    return [round(statistics.median(times), 2) for times in zip(*runs, strict=True)]


def measure(name: str, model: nn.Module, x: Tensor, folder: Path) -> dict[str, Any]:
    """Saves a function, and measures the package beside the compiled function."""
    path = folder / f"{name.replace(' ', '_').replace(',', '')}.pt2"
    start = time.perf_counter()
    desugar.save(path, model, desugar.call(x))
    saving = time.perf_counter() - start
    ways = {"package": desugar.load(path), "compiled": desugar.compile(model), "eager": model}
    with torch.no_grad():
        for fn in ways.values():
            fn(x)
        calls = time_in_turns(ways, x)
    imports, first, second = time_loading(path)
    return {
        "seconds to save": round(saving, 1),
        "bytes": path.stat().st_size,
        "imports, ms": imports,
        "first load, ms": first,
        "second load, ms": second,
        **{f"{way}, µs a call": value for way, value in calls.items()},
    }


def write_table(cases: dict[str, dict[str, Any]]) -> str:
    """Returns the cases as a table."""
    columns = list(next(iter(cases.values())))
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, figures in cases.items():
        lines.append(f"| {name} | {' | '.join(f'{figures[column]:,}' for column in columns)} |")
    machine = describe_machine()
    where = f"PyTorch {machine['torch']}, one thread of an {machine['cpu']} with {machine['instructions']}"
    return "\n".join([*lines, "", f"{where}; processor time, medians of {TURNS} turns. {MEASURED}", ""])


def main() -> None:
    """Measures all cases, prints them, and writes them to `--out`, with the table of the page beside."""
    parser = argparse.ArgumentParser(description="What a package costs.")
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    torch.manual_seed(0)
    torch.set_num_threads(1)  # calls of a few microseconds are compared
    with tempfile.TemporaryDirectory() as folder:
        cases = {name: measure(name, *case, Path(folder)) for name, case in make_cases().items()}
    text = json.dumps({**describe_machine(), "cases": cases}, indent=2, ensure_ascii=False)
    print(text)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
        out.with_suffix(".md").write_text(write_table(cases), encoding="utf-8")


if __name__ == "__main__":
    main()
