"""Runs the GPU benchmarks, each with the limit that it is measured against. Without a GPU it measures nothing.

    python -m bench.gpu                      # writes bench/results/gpu-NAME.json and .md
    python -m bench.gpu --only int8 decode
    python -m bench.gpu --brief              # fewer sizes, in some minutes

- *int8*: a linear layer with int8 weights, weight-only and dynamic, at decode and prefill sizes. Compared with
  bfloat16, with torchao if it is installed, and with the memory's limit: a copy that moves as many bytes as the weight.
- *decode*: a decode step over many lengths at small batch, as a `PaddedTensor` in buckets with CUDA graphs. Compared
  with `torch.compile(dynamic=True)` on padded batches of the exact width. Counts the recorded graphs.
- *rows* and *model*: a training step of a feed-forward layer and of the demo's model at 25, 50 and 75 % fill. Compared
  with dense padding and `torch.nested`; the limit is dense time times fill.
- *overhead*: the CPU time of a call with wrapped arguments, compared with their inner tensors.
- *events*: the CUDA events, waits and synchronizations of one training step on wrapped arguments, compared with the
  same step on plain tensors.

`python -m bench.goals` compares the figures with their goals. Where `python -m bench.gpu_predicted` wrote a prediction
for this device, its figure stands beside the measured one, which is the prediction's error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu_calls import measure_events, measure_overhead
from bench.gpu_decode import measure_decode
from bench.gpu_int8 import measure_int8
from bench.gpu_predicted import predicted_for
from bench.gpu_rows import measure_model, measure_rows
from bench.report import MICROSECONDS, Row, print_rows, save_rows
from bench.timing import describe_machine

RESULTS = Path(__file__).parent / "results"
MEASURES: dict[str, Callable[..., list[Row]]] = {
    "int8": measure_int8,
    "decode": measure_decode,
    "rows": measure_rows,
    "model": measure_model,
    "overhead": measure_overhead,
    "events": measure_events,
}
# The sizes that the goals are about, for a device that is there for minutes.
BRIEF: dict[str, dict[str, Any]] = {
    "int8": {"batches": (1, 16)},
    "decode": {"batches": (4,)},
    "rows": {"fills": (0.25, 0.5)},
    "model": {"fills": (0.25, 0.5)},
    "overhead": {"counts": (1, 20)},
    "events": {},
}


def with_predictions(rows: list[Row], predicted: dict[tuple[str, str], float]) -> list[Row]:
    """Returns measured rows, and in two more columns what was predicted for them, if anything was."""
    found = []
    for row in rows:
        figure = predicted.get((row.group, row.name)) if row.unit == MICROSECONDS else None
        if figure is not None:
            columns = {"predicted µs": figure, "predicted / measured": figure / row.timing.median}
            row = replace(row, ratios=row.ratios | columns)
        found.append(row)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 2 without CUDA, in which case nothing is written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=MEASURES, nargs="+")
    parser.add_argument("--brief", action="store_true")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(
            "expected a CUDA device, found none: nothing was measured and no file was written",
            file=sys.stderr,
        )
        return 2
    gpu = torch.cuda.get_device_name()
    predicted = predicted_for(gpu, RESULTS / "gpu-predicted.json")
    machine = {**describe_machine(), "gpu": gpu, "cuda": torch.version.cuda or ""}
    for name in options.only or MEASURES:
        sizes = BRIEF[name] if options.brief else {}
        rows = MEASURES[name](options.rounds, **sizes)
        if name != "overhead":  # the CPU's time, which nobody predicts
            rows = with_predictions(rows, predicted)
        print_rows(rows)
        path = options.out / f"gpu-{name}.json"
        command = "bench.gpu --brief" if options.brief else "bench.gpu"
        save_rows(rows, machine, path, rounds=options.rounds, command=command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
