"""Measures when padding pays: widths that suit kernels, and few widths for many lengths.

    python -m bench.padding                  # on the CPU, some minutes: one program is compiled for each width
    python -m bench.padding --device cuda

*Widths*: one op on batches of a width, and of the next multiple that `kernel_multiple` proposes. A ratio below 1 in the
last column means that the wider batch is faster.
*Serving*: batches of requests whose longest row varies. A decoder layer runs them in batches of the exact width, of a
multiple, of powers of two, of proposed buckets, and of one width. Few widths need few programs, and compute on more
padding. `even after` is the number of batches after which compiling for every width has paid off; it uses the
compile time measured here.
Each time is the lower quartile over the rounds, which other work on the machine affects least.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import desugar
from bench.timing import describe_machine, time_side_by_side
from subclasses.ragged import PaddedTensor, kernel_multiple, propose_buckets
from subclasses.ragged.padded.buckets import bucket_of

RESULTS = Path(__file__).parent / "results"
BATCH, DIM, HEADS = 8, 128, 4

# ---------------------------------------------------------------------------------------------------------
# widths
# ---------------------------------------------------------------------------------------------------------


def linear(width: int, options: dict[str, Any]) -> Callable[[], Tensor]:
    """Returns a linear layer on a batch of this width: the width only changes the number of rows."""
    x, w = torch.randn(BATCH, width, DIM, **options), torch.randn(DIM, DIM, **options)
    return lambda: F.linear(x, w)


def scores(width: int, options: dict[str, Any]) -> Callable[[], Tensor]:
    """Returns the scores of attention: the width is both extents of a matrix."""
    q = torch.randn(BATCH, HEADS, width, DIM // HEADS, **options)
    return lambda: q @ q.mT


def weighted(width: int, options: dict[str, Any]) -> Callable[[], Tensor]:
    """Returns the product of attention weights and values: the width is contracted."""
    p = torch.randn(BATCH, HEADS, width, width, **options)
    v = torch.randn(BATCH, HEADS, width, DIM // HEADS, **options)
    return lambda: p @ v


OPS = {"linear": linear, "q @ k.mT": scores, "p @ v": weighted}


@dataclass(frozen=True)
class Width:
    """Times of one op on two widths, in microseconds."""

    op: str
    dtype: str
    width: int
    proposed: int
    micros: float
    micros_proposed: float

    def cells(self) -> list[str]:
        """Returns the cells of a table row."""
        ratio = self.micros_proposed / self.micros
        figures = f"{self.micros:.0f}", f"{self.micros_proposed:.0f}", f"{ratio:.2f}"
        return [self.op, self.dtype, f"{self.width} → {self.proposed}", *figures]


def measure_widths(device: str, rounds: int) -> list[Width]:
    """Times each op at widths just above and just below a multiple."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        options = {"dtype": dtype, "device": device}
        multiple = kernel_multiple(dtype, device)
        for width in (4 * multiple - 1, 4 * multiple + 1, 8 * multiple - 3, 8 * multiple + 3):
            proposed = bucket_of(width, multiple)
            calls = {
                (op, n): synced(make(n, options), device)
                for op, make in OPS.items()
                for n in (width, proposed)
            }
            timings = time_side_by_side(calls, rounds=rounds)
            name = str(dtype).removeprefix("torch.")
            for op in OPS:
                pair = timings[op, width].low, timings[op, proposed].low
                rows.append(Width(op, name, width, proposed, *pair))
    return rows


def synced(call: Callable[[], Tensor], device: str) -> Callable[[], None]:
    """Returns a call that waits for its kernels."""

    def run() -> None:
        call()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


# ---------------------------------------------------------------------------------------------------------
# serving
# ---------------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """A decoder layer: attention and a feed-forward layer, on rows of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(DIM, 3 * DIM), torch.nn.Linear(DIM, DIM)
        self.up, self.down = torch.nn.Linear(DIM, 4 * DIM), torch.nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Returns `[B, T, DIM]` for `[B, T, DIM]`."""
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


@dataclass(frozen=True)
class Serving:
    """Figures of one way to choose widths, over a stream of batches.

    Attributes:
        way: How widths are chosen.
        programs: The number of programs.
        padding: The share of entries that are padding.
        micros: The mean time of a batch in microseconds.
        compile_seconds: The time of one compilation.
        even_after: The number of batches after which a program per length has cost less in all.
    """

    way: str
    programs: int
    padding: float
    micros: float
    compile_seconds: float
    even_after: float

    def cells(self) -> list[str]:
        """Returns the cells of a table row."""
        even = "never" if math.isinf(self.even_after) else f"{self.even_after:,.0f}"
        return [self.way, str(self.programs), f"{self.padding:.0%}", f"{self.micros:.0f}", even]


def measure_serving(device: str, rounds: int, backend: str = "inductor") -> list[Serving]:
    """Measures the mean time of a batch with each way to choose widths."""
    rng = random.Random(0)
    lengths = [min(max(round(rng.lognormvariate(3.2, 0.5)), 1), 64) for _ in range(256)]
    multiple = kernel_multiple(torch.float32, device)
    ways: dict[str, dict[str, Any]] = {
        "every length": {},
        f"multiples of {multiple}": {"multiple": multiple},
        "powers of two": {"buckets": "powers"},
        "2 proposed": {"buckets": propose_buckets(lengths, programs=2, multiple=multiple)},
        "one width": {"buckets": [bucket_of(max(lengths), multiple)]},
    }
    widths = {way: Counter(bucket_of(n, **how) for n in lengths) for way, how in ways.items()}
    micros, seconds = time_widths(
        sorted({w for counts in widths.values() for w in counts}), device, rounds, backend
    )
    rows: list[tuple[str, int, float, float]] = []
    for way, counts in widths.items():
        mean = sum(micros[w] * n for w, n in counts.items()) / len(lengths)
        padding = 1 - sum(lengths) / sum(w * n for w, n in counts.items())
        rows.append((way, len(counts), padding, mean))
    exact = rows[0]
    return [Serving(*row, seconds, breaks_even(row, exact, seconds)) for row in rows]


def breaks_even(row: tuple[Any, ...], exact: tuple[Any, ...], seconds: float) -> float:
    """Returns the number of batches after which a program per length has cost less in all.

    Args:
        row: (way, programs, padding, microseconds) of one way.
        exact: The same of a program per length.
        seconds: The time of one compilation.
    """
    saved = row[3] - exact[3]
    return math.inf if saved <= 0 else (exact[1] - row[1]) * seconds * 1e6 / saved


def time_widths(widths: list[int], device: str, rounds: int, backend: str) -> tuple[dict[int, float], float]:
    """Returns the microseconds of a call at each width, and the median seconds of a compilation."""
    torch.manual_seed(0)
    layer = Layer().to(device)
    torch.compiler.config.force_disable_caches = True  # each compilation starts from nothing
    torch.compiler.config.recompile_limit = len(widths)  # all functions below have one code object
    calls, spent = {}, []
    for width in widths:
        lengths = torch.full((BATCH,), width, device=device)
        x = PaddedTensor(torch.randn(BATCH, width, DIM, device=device), lengths)
        compiled = desugar.compile(lambda x: layer(x), backend=backend, dynamic=False)
        start = time.perf_counter()
        compiled(x)
        spent.append(time.perf_counter() - start)
        calls[width] = synced(lambda f=compiled, x=x: f(x), device)
    timings = time_side_by_side(calls, rounds=rounds)
    return {w: timings[w].low for w in widths}, sorted(spent)[len(spent) // 2]


# ---------------------------------------------------------------------------------------------------------
# showing
# ---------------------------------------------------------------------------------------------------------

HEADINGS = {
    "Widths": ["op", "dtype", "width", "µs", "µs, wider", "ratio"],
    "Serving": ["widths", "programs", "padding", "µs a batch", "even after"],
}


def main() -> None:
    """Measures both tables, prints them, and writes `padding.json` and `padding.md`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        tables = {
            "Widths": measure_widths(options.device, options.rounds),
            "Serving": measure_serving(options.device, options.rounds),
        }
    machine = describe_machine() | {"device": options.device}
    lines = ["Measured by `python -m bench.padding`; its docstring explains the columns.", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    for title, rows in tables.items():
        table = Table(*HEADINGS[title], title=title)
        lines += ["", f"## {title}", "", line(HEADINGS[title]), line(["---"] * len(HEADINGS[title]))]
        for row in rows:
            table.add_row(*row.cells())
            lines.append(line(row.cells()))
        Console().print(table)
    if tables["Serving"]:
        lines += ["", f"One compilation took {tables['Serving'][0].compile_seconds:.1f} s."]
    options.out.mkdir(parents=True, exist_ok=True)
    record = {"machine": machine} | {title: [asdict(row) for row in rows] for title, rows in tables.items()}
    (options.out / "padding.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    (options.out / "padding.md").write_text("\n".join(lines) + "\n")


def line(cells: list[str]) -> str:
    """Returns one line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
