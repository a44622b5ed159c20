"""What needs a GPU, each item beside the limit that it is measured against. Where there is none this says so.

    python -m bench.gpu                      # writes bench/results/gpu-NAME.json and .md
    python -m bench.gpu --only int8

*int8*: a linear layer with int8 weights at decode and prefill sizes, beside bfloat16, beside torchao where it is
installed, and beside a copy of as many bytes as the weight has: the memory's limit. *rows*: a training step at 25, 50
and 75 % fill, dense padding and `torch.nested` beside it; the limit is dense time times fill. *events*: how many
events, waits and synchronizations one training step on wrapped arguments makes, beside the same step on plain tensors.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import desugar
from bench.layouts import multiply
from bench.report import Row, print_rows, save_rows
from bench.subjects import KINDS, copy_function, double
from bench.timing import Timing, describe_machine, time_side_by_side
from examples.int8_weight import Int8Weight, quantizer
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


@torch.no_grad()
def measure_int8(rounds: int) -> list[Row]:
    """Weight-only linear layers."""
    rows = []
    for size in (4096, 8192):
        weight = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
        quantized = quantizer(Int8Weight)(weight)
        bytes_of_weight = torch.empty(size, size, dtype=torch.int8, device="cuda")
        for m in (1, 16, 256, 4096):
            torch.compiler.reset()
            x = torch.randn(m, size, device="cuda", dtype=torch.bfloat16)
            bf16 = torch.compile(copy_function(multiply), fullgraph=True)
            ours = desugar.compile(copy_function(multiply))
            calls: dict[str, Call] = {
                "bf16, torch.compile": lambda f=bf16, x=x, w=weight: f(x, w),
                "int8, desugar.compile": lambda f=ours, x=x, w=quantized: f(x, w),
                "limit: a copy of the int8 weight": bytes_of_weight.clone,
            }
            if importlib.util.find_spec("torchao") is not None:
                calls["int8, torchao"] = _torchao(weight, x)
            rows += _rows(f"int8, M = {m}, N = K = {size}", calls, rounds, "bf16, torch.compile")
    return rows


def _torchao(weight: Tensor, x: Tensor) -> Call:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = nn.Sequential(nn.Linear(*reversed(weight.shape), bias=False, device="meta"))
    model[0].weight = nn.Parameter(weight.clone(), requires_grad=False)
    quantize_(model, Int8WeightOnlyConfig())
    layer = torch.compile(model, fullgraph=True)
    return lambda: layer(x)


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
    return Counter(event.name for event in seen.events())


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
