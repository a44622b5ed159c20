"""When padding pays: widths that kernels like, and few widths for many lengths.

    python -m bench.padding                  # on the CPU, some minutes: one program is compiled for each width
    python -m bench.padding --device cuda

*Widths*: one op on tables of a width and of the next multiple that `kernel_multiple` proposes. Below 1 in the last
column the wider table is the faster one. *Serving*: batches of requests whose longest row varies, run by a decoder
layer in tables of that very width, of a multiple, of powers of two, of proposed buckets, and of one width. Few widths
are few programs; what they cost is the padding that is computed on. `even after` is how many batches it takes until
compiling for every width has paid for itself, with one compilation as it was measured here. Each time is the lower
quartile over the rounds, which other work on the machine moves least.
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
    """A layer on a table of this width: its rows only grow in number."""
    x, w = torch.randn(BATCH, width, DIM, **options), torch.randn(DIM, DIM, **options)
    return lambda: F.linear(x, w)


def scores(width: int, options: dict[str, Any]) -> Callable[[], Tensor]:
    """Scores of attention: the width is both extents of a matrix."""
    q = torch.randn(BATCH, HEADS, width, DIM // HEADS, **options)
    return lambda: q @ q.mT


def weighted(width: int, options: dict[str, Any]) -> Callable[[], Tensor]:
    """What the scores weight: the width is contracted."""
    p = torch.randn(BATCH, HEADS, width, width, **options)
    v = torch.randn(BATCH, HEADS, width, DIM // HEADS, **options)
    return lambda: p @ v


OPS = {"linear": linear, "q @ k.mT": scores, "p @ v": weighted}


@dataclass(frozen=True)
class Width:
    """One op on two widths, in microseconds."""

    op: str
    dtype: str
    width: int
    proposed: int
    micros: float
    micros_proposed: float

    def cells(self) -> list[str]:
        """As a row of a table."""
        ratio = self.micros_proposed / self.micros
        figures = f"{self.micros:.0f}", f"{self.micros_proposed:.0f}", f"{ratio:.2f}"
        return [self.op, self.dtype, f"{self.width} → {self.proposed}", *figures]


def measure_widths(device: str, rounds: int) -> list[Width]:
    """Each op at widths just past, and just before, a multiple."""
    found = []
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
                found.append(Width(op, name, width, proposed, *pair))
    return found


def synced(call: Callable[[], Tensor], device: str) -> Callable[[], None]:
    """A call that ends when its kernels do."""

    def run() -> None:
        call()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


# ---------------------------------------------------------------------------------------------------------
# serving
# ---------------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """Attention and a feed-forward layer, on rows of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(DIM, 3 * DIM), torch.nn.Linear(DIM, DIM)
        self.up, self.down = torch.nn.Linear(DIM, 4 * DIM), torch.nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, DIM]` to the same."""
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


@dataclass(frozen=True)
class Serving:
    """One way to choose widths, over a stream of batches."""

    way: str
    programs: int
    padding: float
    micros: float
    compile_seconds: float
    even_after: float

    def cells(self) -> list[str]:
        """As a row of a table."""
        even = "never" if math.isinf(self.even_after) else f"{self.even_after:,.0f}"
        return [self.way, str(self.programs), f"{self.padding:.0%}", f"{self.micros:.0f}", even]


def measure_serving(device: str, rounds: int, backend: str = "inductor") -> list[Serving]:
    """The mean time of a batch with each choice of widths."""
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
    """After how many batches a program for every length has cost less in all."""
    saved = row[3] - exact[3]
    return math.inf if saved <= 0 else (exact[1] - row[1]) * seconds * 1e6 / saved


def time_widths(widths: list[int], device: str, rounds: int, backend: str) -> tuple[dict[int, float], float]:
    """Microseconds a call at each width, and the seconds that one compilation takes."""
    torch.manual_seed(0)
    layer = Layer().to(device)
    torch.compiler.config.force_disable_caches = True  # every compilation is one
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
    """Measures, prints, and writes `padding.json` and `padding.md`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        found = {
            "Widths": measure_widths(options.device, options.rounds),
            "Serving": measure_serving(options.device, options.rounds),
        }
    machine = describe_machine() | {"device": options.device}
    lines = ["Measured by `python -m bench.padding`; see its docstring for what is what.", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    for title, rows in found.items():
        table = Table(*HEADINGS[title], title=title)
        lines += ["", f"## {title}", "", line(HEADINGS[title]), line(["---"] * len(HEADINGS[title]))]
        for row in rows:
            table.add_row(*row.cells())
            lines.append(line(row.cells()))
        Console().print(table)
    if found["Serving"]:
        lines += ["", f"One compilation took {found['Serving'][0].compile_seconds:.1f} s."]
    options.out.mkdir(parents=True, exist_ok=True)
    record = {"machine": machine} | {title: [asdict(row) for row in rows] for title, rows in found.items()}
    (options.out / "padding.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    (options.out / "padding.md").write_text("\n".join(lines) + "\n")


def line(cells: list[str]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
