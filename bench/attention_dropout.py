"""Benchmarks the dropout of attention over rows on the CPU: forward and backward, with and without.

    python -m bench.attention_dropout         # about three minutes; writes bench/results/attention-dropout.*

Rows of at most 500 entries, most of them short, 8 heads, 512 features. *dense* is PyTorch's attention of the padded
table. *limit* is 1.3 times the attention without dropout, plus the time of drawing the numbers. `torch.rand` draws one
for each score of an existing query and key. Before anything is timed, the mean of the results with dropout is compared
with the result without.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import desugar
from bench.int8_sizes import time_fastest
from bench.report import Row, print_rows, save_rows
from bench.timing import Timing, describe_machine
from subclasses.ragged import JaggedTensor

RESULTS = Path(__file__).parent / "results"
NAME = "attention-dropout"
SHORTEST, LONGEST, HEADS, WIDTH, P = 20, 500, 8, 512, 0.1
WAYS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda f: f,
    "torch.compile": torch.compile,
    "desugar.compile": desugar.compile,
}
DRAW = "torch.rand"


def draw_lengths(count: int) -> list[int]:
    """Returns the lengths of rows: the shortest, the longest, and others, that fill a quarter of a table."""
    rng = random.Random(1)
    drawn = [SHORTEST + int(rng.expovariate(1 / 95)) for _ in range(count - 2)]
    return [SHORTEST, LONGEST, *(min(n, LONGEST) for n in drawn)]


def heads(x: Any) -> Any:
    """``[B, T, WIDTH]`` to ``[B, HEADS, T, WIDTH / HEADS]``."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def attend(q: Any, k: Any, v: Any, p: float, causal: bool) -> Any:
    """The attention."""
    return F.scaled_dot_product_attention(heads(q), heads(k), heads(v), dropout_p=p, is_causal=causal)


def make_calls(lengths: list[int], causal: bool) -> dict[str, Callable[[], Any]]:
    """Returns calls by name: forward and backward, "way/p", and the drawing of numbers, `DRAW`."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    rows = [torch.randn(sum(lengths), WIDTH, requires_grad=True) for _ in range(3)]
    tables = [torch.randn(len(lengths), max(lengths), WIDTH, requires_grad=True) for _ in range(3)]
    jagged = [JaggedTensor(t, offsets, max_length=max(lengths)) for t in rows]
    calls = {}
    for p in (0.0, P):
        for way, compiler in WAYS.items():
            calls[f"{way}/{p}"] = make_step(compiler(attend), jagged, rows, p, causal)
        calls[f"dense/{p}"] = make_step(attend, tables, tables, p, causal)
    scores = HEADS * sum(n * (n + 1) // 2 if causal else n * n for n in lengths)
    return calls | {DRAW: lambda: torch.rand(scores)}


def make_step(run: Any, inputs: list[Any], leaves: list[Tensor], p: float, causal: bool) -> Callable[[], Any]:
    """Returns a forward with its backward; it returns the result."""

    def step() -> Tensor:
        out = run(*inputs, p, causal)
        out = out.values if isinstance(out, JaggedTensor) else out
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        return out.detach()

    return step


def check_mean(calls: dict[str, Callable[[], Any]], times: int = 20) -> None:
    """Raises ValueError if the mean of results with dropout is far from the result without."""
    for way in WAYS:
        exact = calls[f"{way}/0.0"]()
        mean = sum(calls[f"{way}/{P}"]() for _ in range(times)) / times
        wrong = ((mean - exact).square().sum() / exact.square().sum()).item()
        if not 1e-3 < wrong * times < 2:
            raise ValueError(
                f"{way}: expected the attention without dropout as the mean, got it off by {wrong}"
            )


def rows_of(timings: dict[str, Timing], group: str) -> list[Row]:
    """Returns the table: each attention with dropout relative to the one without, and to its limit."""
    rows, draw = [], timings[DRAW].median
    for way in (*WAYS, "dense"):
        without, dropped = (timings[f"{way}/{p}"] for p in (0.0, P))
        ratios = {
            "/ without": dropped.median / without.median,
            "/ limit": dropped.median / (1.3 * without.median + draw),
        }
        rows.append(Row(group, f"{way}, without", _milliseconds(without), unit="ms"))
        rows.append(Row(group, f"{way}, p={P}", _milliseconds(dropped), ratios, "ms", way != "dense"))
    return [*rows, Row(group, DRAW, _milliseconds(timings[DRAW]), unit="ms")]


def _milliseconds(timing: Timing) -> Timing:
    return Timing(*(t / 1e3 for t in (timing.median, timing.low, timing.high)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=16, help="rows in a batch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0, help="for all turns of one call")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    lengths = draw_lengths(options.rows)
    rows = []
    for causal in (False, True):
        calls = make_calls(lengths, causal)
        check_mean(calls)
        fill = sum(lengths) / len(lengths) / max(lengths)
        kind = "causal, " if causal else ""
        rows += rows_of(time_fastest(calls, options.seconds), f"{kind}{len(lengths)} rows, fill {fill:.2f}")
    print_rows(rows)
    save_rows(rows, describe_machine(), options.out / f"{NAME}.json", command="bench.attention_dropout")


if __name__ == "__main__":
    main()
