"""Benchmarks a training step over long rows: a language model of two layers, width 256, over rows of 20 to 500 entries.

    python -m bench.long_rows                 # about five minutes; writes bench/results/long-rows.*

Sixteen rows, most of them short, so that a table of the width of the longest is padding for two thirds. The same model,
once for each kind of batch and way to run it:

*dense table*: padded with zeros, targets that `F.cross_entropy` ignores. It computes on its padding.
*PaddedTensor*: the same table, of which the padding has no value. *by length*: the rows in four tables, one for each
width from `propose_buckets`; the loss is the sum of the tables' losses, weighted by their entries.
*JaggedTensor*: no padding.

Two threads. Before anything is timed, all losses are compared. A figure is the median of the fastest tenth of the
turns, as in `bench.int8_sizes`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import desugar
from bench.int8_sizes import time_fastest
from bench.report import Row, print_rows, save_rows
from bench.timing import Timing, describe_machine
from examples._language_model import Batch, LanguageModel, dense, jagged
from subclasses.ragged import PaddedTensor, propose_buckets

RESULTS = Path(__file__).parent / "results"
NAME = "long-rows"
SHORTEST, LONGEST, WIDTH, LAYERS = 20, 500, 256, 2
POSITIONS = 512  # of the model: a table may be wider than its longest row
WAYS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda model: model,
    "torch.compile": torch.compile,
    "desugar.compile": desugar.compile,
}


def draw_rows(count: int) -> list[Tensor]:
    """Returns rows of tokens: the shortest, the longest, and others of lengths whose mean is a third of the longest."""
    rng = random.Random(0)
    drawn = [SHORTEST + int(rng.expovariate(1 / 130)) for _ in range(count - 2)]
    lengths = [SHORTEST, LONGEST, *(min(n, LONGEST) for n in drawn)]
    return [torch.randint(0, 256, (n + 1,)) for n in lengths]


def padded(rows: list[Tensor]) -> Batch:
    """Returns inputs and targets as tables that know the lengths of their rows."""
    tokens, targets = (
        PaddedTensor.from_tensors([r[cut] for r in rows]) for cut in (slice(-1), slice(1, None))
    )
    return tokens, targets


def by_length(rows: list[Tensor]) -> list[tuple[float, Batch]]:
    """Returns a batch for each width in use, with its part of all entries."""
    buckets = propose_buckets([len(r) - 1 for r in rows], programs=4)
    total = sum(len(r) - 1 for r in rows)
    tables = PaddedTensor.by_length([r[:-1] for r in rows], buckets)
    batches = []
    for numbers, tokens in tables:
        ((_, targets),) = PaddedTensor.by_length([rows[n][1:] for n in numbers], [tokens.shape[1]])
        batches.append((int(tokens.lengths.sum()) / total, (tokens, targets)))
    return batches


def make_step(model: LanguageModel, way: str, batches: list[tuple[float, Batch]]) -> Callable[[], float]:
    """Returns a training step without its optimizer; it returns the loss."""
    run, parameters = WAYS[way](model), list(model.parameters())

    def step() -> float:
        loss = sum(share * run(*batch) for share, batch in batches)
        torch.autograd.grad(loss, parameters)
        return float(loss.detach())

    return step


def make_steps(rows: list[Tensor]) -> dict[tuple[str, str], Callable[[], float]]:
    """Returns the steps by (kind, way)."""
    kinds = {
        "dense table": [(1.0, dense(rows))],
        "PaddedTensor": [(1.0, padded(rows))],
        "PaddedTensor, by length": by_length(rows),
        "JaggedTensor": [(1.0, jagged(rows))],
    }
    steps = {}
    for kind, batches in kinds.items():
        for way in WAYS:
            if len(batches) == 1 or way != "torch.compile":
                torch.manual_seed(0)
                steps[kind, way] = make_step(LanguageModel(WIDTH, 4, LAYERS, POSITIONS), way, batches)
    return steps


def check_equal(steps: dict[tuple[str, str], Callable[[], float]]) -> None:
    """Raises ValueError if the losses differ."""
    losses = {name: step() for name, step in steps.items()}
    first = next(iter(losses.values()))
    if any(abs(loss - first) > 1e-4 * abs(first) for loss in losses.values()):
        raise ValueError(f"expected equal losses, got {losses}")


def rows_of(timings: dict[tuple[str, str], Timing], fill: float, count: int) -> list[Row]:
    """Returns the table: each step relative to the dense one, eager and compiled."""
    dense_eager, dense_compiled = (timings["dense table", way].median for way in ("eager", "torch.compile"))
    group = f"{count} rows of {SHORTEST} to {LONGEST} entries, fill {fill:.2f}"
    return [
        Row(
            group,
            f"{kind}, {way}",
            Timing(*(t / 1e3 for t in (timing.median, timing.low, timing.high))),
            {
                "/ dense, eager": timing.median / dense_eager,
                "/ dense, torch.compile": timing.median / dense_compiled,
            },
            unit="ms a step",
            ours=way == "desugar.compile" or (way == "eager" and kind != "dense table"),
        )
        for (kind, way), timing in timings.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=16, help="rows in a batch")
    parser.add_argument("--seconds", type=float, default=10.0, help="for all turns of one step")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    rows = draw_rows(options.rows)
    steps = make_steps(rows)
    check_equal(steps)
    timings = time_fastest({f"{kind}/{way}": step for (kind, way), step in steps.items()}, options.seconds)
    entries = [len(r) - 1 for r in rows]
    timed_rows = rows_of(
        dict(zip(steps, timings.values(), strict=True)), sum(entries) / len(entries) / LONGEST, len(rows)
    )
    print_rows(timed_rows)
    save_rows(timed_rows, describe_machine(), options.out / f"{NAME}.json", command="bench.long_rows")


if __name__ == "__main__":
    main()
