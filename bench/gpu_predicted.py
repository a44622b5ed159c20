"""Predicts the figures of the GPU benchmarks, without a GPU, against the goals that wait for one.

    python -m bench.gpu_predicted            # writes bench/results/gpu-predicted.json and .md

It needs PyTorch's CUDA build (`make bench-gpu-predicted TORCH=2.15.0`), no driver and no GPU. All times are
*predicted* by the roofline of the device's data sheet and by assumed costs of launches (`bench.prediction.roofline`).
`make bench-gpu` measures the same subjects where there is a GPU; its times are shown in columns of their own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.stages import model as gpu_model, padded
from bench.prediction import DEVICES, Way, predict
from bench.prediction.fake import check_installation
from bench.prediction.predicting import OURS, STOCK
from bench.report import MICROSECONDS, Row, load_rows, print_rows, save_rows
from bench.subjects import KINDS, copy_function, double
from bench.timing import Timing
from examples._language_model import LanguageModel, dense, jagged
from subclasses.int8 import Int8Tensor
from subclasses.ragged import PaddedTensor

RESULTS = Path(__file__).parent / "results"
UNIT = "predicted µs a call"
HOW = "*Predicted*, but for the columns of measured times,"
MEASURED = (
    "int8",
    "dynamic",
    "padded",
    "model",
    "events",
)  # stages of `bench.gpu` that time predicted subjects

# ---------------------------------------------------------------------------------------------------------
# subjects
# ---------------------------------------------------------------------------------------------------------


def predict_way(device: str, way: str, fn: Any, *args: Any, **options: Any) -> Way:
    """Predicts one way to run a function.

    Raises:
        RuntimeError: It cannot be predicted.
    """
    prediction = predict(fn, args, device=device, ways=(way,), **options).way(way)
    if prediction.error:
        raise RuntimeError(f"expected a prediction of {way}, got an error: {prediction.error}")
    return prediction


def _row(
    device: str, group: str, name: str, ways: Way | list[Way], seconds: float, ratios: dict[str, float]
) -> Row:
    """Returns the row of a prediction, of several ways their mean; `bench.gpu` measures the same group and name."""
    ways = [ways] if isinstance(ways, Way) else ways
    timing = Timing(*[1e6 * seconds] * 3)
    counts = {"launches": fmean(way.launches for way in ways), "MB": fmean(way.bytes for way in ways) / 1e6}
    return Row(f"{device.upper()}: {group}", name, timing, counts | ratios, UNIT, ours="desugar" in name)


def multiply(x: Tensor, w: Any) -> Tensor:
    return F.linear(x, w)


@torch.no_grad()
def predict_int8(
    device: str, sizes: tuple[int, ...] = (4096, 8192), batches: tuple[int, ...] = (1, 16)
) -> Iterator[Row]:
    """Yields an int8 layer and a bfloat16 layer in CUDA graphs, as `bench.gpu.stages.int8` measures them."""
    bandwidth = DEVICES[device].bandwidth
    for size in sizes:
        weight = torch.ones(size, size, dtype=torch.bfloat16)
        kinds = {
            f"bf16, {STOCK}": (STOCK, weight, 2 * size**2),
            f"int8 weight-only, {OURS}": (OURS, Int8Tensor.from_float(weight), size**2),
            f"int8 dynamic, {OURS}": (OURS, Int8Tensor.from_float(weight, activation="row"), size**2),
        }
        for batch in batches:
            x = torch.ones(batch, size, dtype=torch.bfloat16)
            ways = {name: predict_way(device, way, multiply, x, w) for name, (way, w, _) in kinds.items()}
            plain = _graphed(ways[f"bf16, {STOCK}"])
            for name, way in ways.items():
                ratios = {
                    "bf16 / this": plain / _graphed(way),
                    "of the bandwidth": kinds[name][2] / bandwidth / _graphed(way),
                }
                yield _row(device, f"int8, M = {batch}, N = K = {size}", name, way, _graphed(way), ratios)


def _graphed(way: Way) -> float:
    if way.graphed_seconds is None:
        reasons = [reason for stage in way.stages for reason in stage.no_cuda_graph]
        raise RuntimeError(
            f"expected a program that can be a CUDA graph, got one that cannot: {'; '.join(reasons)}"
        )
    return way.graphed_seconds


@torch.no_grad()
def predict_padded(device: str, batch: int = 4, serving: padded.Serving | None = None) -> Iterator[Row]:
    """Yields a prefix that is encoded again: the mean over full batches of each bucket.

    `bench.gpu.stages.padded` measures all lengths.
    """
    serving = serving or padded.Serving()
    model = serving.make_model("cpu")
    widths = [serving.bucket * (i + 1) for i in range(serving.num_buckets)]
    requests = [rows for rows in serving.make_requests(batch, "cpu") if max(map(len, rows)) in widths]
    hand, step = padded.next_byte_by_hand, padded.next_byte
    ways: dict[str, list[Way]] = {name: [] for name in (padded.DYNAMIC, padded.BUCKETS, padded.LIMIT)}
    for rows in requests:
        exact, bucketed = (padded.pad_by_hand(rows, multiple) for multiple in (1, serving.bucket))
        batch_of_rows = PaddedTensor.from_tensors(rows, multiple=serving.bucket)
        ways[padded.DYNAMIC].append(predict_way(device, STOCK, hand, model, *exact, dynamic=True))
        ways[padded.BUCKETS].append(predict_way(device, OURS, step, model, batch_of_rows, dynamic=False))
        ways[padded.LIMIT].append(predict_way(device, STOCK, hand, model, *bucketed))
    dynamic = fmean(way.seconds for way in ways[padded.DYNAMIC])
    for name, predictions in ways.items():
        seconds = dynamic if name == padded.DYNAMIC else fmean(map(_graphed, predictions))
        yield _row(
            device, padded.group_of(batch), name, predictions, seconds, {"dynamic / this": dynamic / seconds}
        )


def predict_model(device: str, scale: gpu_model.Scale | None = None) -> Iterator[Row]:
    """Yields forward and backward of the demo's model; `bench.gpu.stages.model` adds the optimizer's step."""
    scale = scale or gpu_model.Scale()
    model = LanguageModel(scale.dim, scale.heads, scale.layers, scale.width).to(scale.dtype)
    for fill in gpu_model.FILLS:
        lengths = gpu_model.uneven_lengths(fill, scale.width, scale.batch)
        rows = [torch.zeros(n + 1, dtype=torch.int64) for n in lengths]
        filled = sum(lengths) / (scale.batch * scale.width)
        ways = {
            gpu_model.DENSE: predict_way(device, STOCK, model, *dense(rows)),
            gpu_model.JAGGED: predict_way(device, OURS, model, *jagged(rows)),
        }
        whole = ways[gpu_model.DENSE].seconds
        for name, way in ways.items():
            ratios = {"/ dense": way.seconds / whole, "/ (dense * fill)": way.seconds / (whole * filled)}
            yield _row(device, f"model, training, {filled:.0%} fill", name, way, way.seconds, ratios)


def predict_wrappers(device: str, count: int = 20) -> Iterator[Row]:
    """Yields a training step on wrapped arguments and on their inner tensors, as `bench.gpu.stages.calls` does."""
    for kind in ("plain", "declared"):
        pairs = [torch.rand(2, 8, 8).unbind() for _ in range(count)]
        args = [x.detach().requires_grad_() for a, b in pairs for x in KINDS[kind](a, b)]
        way = predict_way(device, OURS, copy_function(double), *args)
        waits = sum(len(stage.synchronizations) + len(stage.copies) for stage in way.stages)
        ratios = {"waits and copies": float(waits)}
        yield _row(device, f"training, N = {count}", f"{kind}, {OURS}", way, way.seconds, ratios)


SUBJECTS: dict[str, Callable[[str], Iterator[Row]]] = {
    "int8": predict_int8,
    "padded": predict_padded,
    "model": predict_model,
    "wrappers": predict_wrappers,
}


def measured_on(device: str, folder: Path = RESULTS) -> dict[tuple[str, str], float]:
    """Returns the µs that `bench.gpu` measured on a device, by the group and name of the row.

    Args:
        device: A word of the device's name, such as "H100".
        folder: The folder of the measured pages.
    """
    medians = {}
    for path in (folder / f"gpu-{stage}.json" for stage in MEASURED):
        rows, machine = load_rows(path) if path.exists() else ([], {})
        words = (machine.get("device") or machine.get("gpu", "")).upper().replace("-", " ").split()
        if device.upper() in words:
            medians |= {(row.group, row.name): row.timing.median for row in rows if row.unit == MICROSECONDS}
    return medians


def with_measured(rows: list[Row], measured: dict[tuple[str, str], float]) -> list[Row]:
    """Returns predicted rows of one device, with two more columns for the rows that were measured."""
    extended = []
    for row in rows:
        figure = measured.get((row.group.partition(": ")[2], row.name))
        if figure is not None:
            columns = {"measured µs": figure, "predicted / measured": row.timing.median / figure}
            row = replace(row, ratios=row.ratios | columns)
        extended.append(row)
    return extended


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 2 where PyTorch's CUDA build is missing, in which case nothing is written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=SUBJECTS, nargs="+")
    parser.add_argument("--devices", choices=DEVICES, nargs="+", default=["h100", "a100"])
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu-predicted.json")
    options = parser.parse_args(arguments)
    try:
        check_installation(DEVICES["h100"])
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    rows = []
    for device in options.devices:
        predicted = [row for name in options.only or SUBJECTS for row in SUBJECTS[name](device)]
        rows += with_measured(predicted, measured_on(device))
    print_rows(rows)
    machine = {"device": "none: nothing was run", "torch": torch.__version__}
    save_rows(rows, machine, options.out, command="bench.gpu_predicted", how=HOW)
    return 0


if __name__ == "__main__":
    sys.exit(main())
