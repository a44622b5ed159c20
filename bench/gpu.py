"""What needs a GPU, each item beside the limit that it is measured against. Where there is none this says so.

    python -m bench.gpu                      # writes bench/results/gpu-NAME.json and .md
    python -m bench.gpu --only int8

*int8*: a linear layer with int8 weights, weight-only and dynamic, at decode and prefill sizes, beside bfloat16, beside
torchao where it is installed, and beside copying, which moves as many bytes as the weight has: the memory's limit.
*rows*: a training step at 25, 50
and 75 % fill, dense padding and `torch.nested` beside it; the limit is dense time times fill. *events*: how many
events, waits and synchronizations one training step on wrapped arguments makes, beside the same step on plain tensors.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import desugar
from bench.layouts import HAS_TORCHAO, multiply, torchao_weights
from bench.report import Row, print_rows, save_rows
from bench.subjects import KINDS, copy_function, double
from bench.timing import Timing, describe_machine, time_side_by_side
from subclasses.int8 import Int8Tensor
from subclasses.ragged import JaggedTensor

RESULTS = Path(__file__).parent / "results"
EVENTS = ("cudaEventRecord", "cudaStreamWaitEvent", "cudaStreamSynchronize", "cudaDeviceSynchronize")
Call = Callable[[], Any]


def _rows(group: str, calls: dict[str, Call], rounds: int, first: str) -> list[Row]:
    """Times calls whose end is the end of their kernels, as ratios to one of them."""
    timings = time_side_by_side({name: _synced(call) for name, call in calls.items()}, rounds=rounds)
    return [
        Row(group, name, t, {f"/ {first}": t.median / timings[first].median}, ours="desugar" in name)
        for name, t in timings.items()
    ]


def _synced(call: Call) -> Call:
    def run() -> None:
        call()
        torch.cuda.synchronize()

    for _ in range(3):
        run()
    return run


# ---------------------------------------------------------------------------------------------------------
# int8
# ---------------------------------------------------------------------------------------------------------


CACHE = 2**28  # bytes of int8 weights that one turn reads: more than any cache holds
PLAIN, LIMIT = "bf16, torch.compile", "limit: copying, moving as many bytes as the int8 weight has"
Kinds = dict[str, tuple[Callable, Sequence[Tensor]]]


@torch.no_grad()
def measure_int8(
    rounds: int,
    sizes: Sequence[int] = (4096, 8192),
    batches: Sequence[int] = (1, 16, 256, 4096),
    device: str = "cuda",
) -> list[Row]:
    """Linear layers, weight-only and dynamic, as CUDA graphs over weights that no cache keeps; times of one layer."""
    rows = []
    for size in sizes:
        shape, options = (size, size), {"device": device, "dtype": torch.bfloat16}
        weights = [torch.randn(shape, **options) for _ in range(max(1, CACHE // size**2))]
        kinds = _int8_kinds(weights)
        for m in batches:
            torch.compiler.reset()
            x = torch.randn(m, size, **options)
            calls = {}
            for name, (compile, given) in kinds.items():
                fn = compile(copy_function(multiply))
                calls[name] = [lambda f=fn, x=x, w=w: f(x, w) for w in given]
            half = torch.empty(len(weights), size * size // 2, dtype=torch.int8, device=device)
            calls[LIMIT] = [part.clone for part in half]  # half of the bytes are read, half written
            rows += _layer_rows(f"int8, M = {m}, N = K = {size}", calls, rounds)
    return rows


def _int8_kinds(weights: list[Tensor]) -> Kinds:
    """Name -> what compiles it, and its weights."""
    kinds: Kinds = {
        PLAIN: (torch.compile, weights),
        "int8 weight-only, desugar.compile": (desugar.compile, [Int8Tensor.from_float(w) for w in weights]),
        "int8 dynamic, desugar.compile": (
            desugar.compile,
            [Int8Tensor.from_float(w, activation="row") for w in weights],
        ),
    }
    for name, kind in (
        ("int8 weight-only, torchao", "torchao"),
        ("int8 dynamic, torchao", "dynamic torchao"),
    ):
        theirs = [torchao_weights(w)[kind] for w in weights if HAS_TORCHAO]
        if theirs:
            kinds[name] = (torch.compile, theirs)
    return kinds


def _layer_rows(group: str, calls: dict[str, list[Call]], rounds: int) -> list[Row]:
    """The time of one of several calls of each kind, beside bfloat16 and the limit."""
    graphs = {name: graph for name, steps in calls.items() if (graph := _as_graph(name, steps))}
    timings = time_side_by_side({name: _synced(graph) for name, graph in graphs.items()}, rounds=rounds)
    plain, limit = timings[PLAIN].median, timings[LIMIT].median
    rows = []
    for name, t in timings.items():
        one = Timing(*(figure / len(calls[name]) for figure in (t.median, t.low, t.high)))
        ratios = {f"/ {PLAIN}": t.median / plain, "limit / this": limit / t.median}
        rows.append(Row(group, name, one, ratios, ours="desugar" in name))
    return rows


def _as_graph(name: str, steps: list[Call]) -> Call | None:
    """Steps as one CUDA graph: their kernels, without what launching them takes on the CPU."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and allocates what libraries keep
        for step in steps * 2:
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for step in steps:
                step()
    except RuntimeError as error:  # a kernel that cannot be recorded has no time
        print(f"no figure for {name}: {error}", file=sys.stderr)
        return None
    return graph.replay


# ---------------------------------------------------------------------------------------------------------
# rows of uneven length
# ---------------------------------------------------------------------------------------------------------


def feed_forward(x: Any, up: Tensor, down: Tensor) -> Any:
    return x + F.linear(F.gelu(F.linear(F.layer_norm(x, (x.shape[-1],)), up)), down)


def measure_rows(rounds: int, width: int = 512, dim: int = 1024, batch: int = 32) -> list[Row]:
    """One training step of a feed-forward layer."""
    rows = []
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    up, down = torch.randn(4 * dim, dim, **options) / 32, torch.randn(dim, 4 * dim, **options) / 64
    for fill in (0.25, 0.5, 0.75):
        torch.compiler.reset()
        # Evenly spread around the mean; the longest row fills the table.
        lengths = (
            torch.linspace(max(1.0, (2 * fill - 1) * width), min(2 * fill, 1.0) * width, batch).int().tolist()
        )
        parts = [torch.randn(n, dim, **options) for n in [*lengths[:-1], width]]
        full = sum(len(p) for p in parts) / (batch * width)
        kinds: dict[str, tuple[Any, Callable]] = {
            "dense table, torch.compile": (nn.utils.rnn.pad_sequence(parts, batch_first=True), torch.compile),
            "JaggedTensor, desugar.compile": (JaggedTensor.from_tensors(parts), desugar.compile),
            "torch.nested, torch.compile": (
                torch.nested.nested_tensor(parts, layout=torch.jagged),
                torch.compile,
            ),
        }
        calls = {
            name: _step(compile(copy_function(feed_forward)), x, up, down)
            for name, (x, compile) in kinds.items()
        }
        rows += _rows(f"training, {full:.0%} fill", calls, rounds, "dense table, torch.compile")
    return rows


def _step(fn: Callable, x: Any, up: Tensor, down: Tensor) -> Call:
    leaf, weights = x.detach().requires_grad_(), [w.detach().requires_grad_() for w in (up, down)]
    with torch.no_grad():
        like = fn(leaf, *weights).detach()
    return lambda: torch.autograd.grad(fn(leaf, *weights), [leaf, *weights], like)


# ---------------------------------------------------------------------------------------------------------
# events
# ---------------------------------------------------------------------------------------------------------


def measure_events(rounds: int, count: int = 20) -> list[Row]:
    """Calls of the CUDA runtime in one training step, and its time."""
    calls = {}
    for kind in ("plain", "declared"):
        pairs = [torch.rand(2, 8, 8, device="cuda").unbind() for _ in range(count)]
        args = [x.detach().requires_grad_() for a, b in pairs for x in KINDS[kind](a, b)]
        tangents = [x.detach().clone() for x in args]
        fn = desugar.compile(copy_function(double))
        calls[f"{kind}, desugar.compile"] = lambda f=fn, a=args, t=tangents: torch.autograd.grad(f(*a), a, t)
    rows = _rows(f"training, N = {count}", calls, rounds, "plain, desugar.compile")
    for name, call in calls.items():
        seen = _count_events(call)
        for event in EVENTS:
            amount = float(seen[event])
            timing = Timing(amount, amount, amount)
            rows.append(
                Row(f"{event} in a training step", name, timing, unit="calls", ours="declared" in name)
            )
    return sorted(rows, key=lambda row: row.group)


def _count_events(call: Call) -> Counter[str]:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        call()
    return Counter(event.name for event in seen.events() or ())


MEASURES: dict[str, Callable[[int], list[Row]]] = {
    "int8": measure_int8,
    "rows": measure_rows,
    "events": measure_events,
}


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 2 where there is no CUDA, and then nothing is written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=MEASURES, nargs="+")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(
            "expected a CUDA device, found none: nothing was measured and no file was written",
            file=sys.stderr,
        )
        return 2
    machine = {**describe_machine(), "gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda or ""}
    for name in options.only or MEASURES:
        rows = MEASURES[name](options.rounds)
        print_rows(rows)
        path = options.out / f"gpu-{name}.json"
        save_rows(rows, machine, path, rounds=options.rounds, command="bench.gpu")
    return 0


if __name__ == "__main__":
    sys.exit(main())
