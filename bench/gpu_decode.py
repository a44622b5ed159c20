"""Benchmarks a decode step over many lengths on a GPU: padded batches in buckets with CUDA graphs.

At small batch, launching kernels takes more time than running them. A CUDA graph launches all kernels at once, but
only for the sizes with which it was recorded. A `PaddedTensor` has few sizes: the widths of its buckets. The rival is
one dynamic program for all lengths. Every subject gets the same requests, of all lengths in turn. The benchmark
synchronizes with the GPU at the end of a round, since no step needs to know a length.

The limit is the same batch padded by hand for this model, with the lengths as a second argument and without a subclass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

import desugar
from bench.gpu_timing import Call, count_row, per_item, synced
from bench.report import Row
from bench.subjects import copy_function
from bench.timing import time_side_by_side
from examples._language_model import LanguageModel
from subclasses.ragged import PaddedTensor

DYNAMIC = "exact widths, torch.compile(dynamic=True)"
BUCKETS = "PaddedTensor in buckets, CUDA graphs, desugar.compile"
NO_GRAPHS = "PaddedTensor in buckets, desugar.compile"
LIMIT = "limit: padded by hand, CUDA graphs, torch.compile"
PROGRAMS, GRAPHS_RECORDED = "programs compiled", "graphs recorded"
GRAPHS: dict[str, Any] = {"mode": "reduce-overhead", "dynamic": False}


@dataclass(frozen=True)
class Serving:
    """A model and its requests: the longest rows of the batches have `stride`, 2 `stride`, ... entries."""

    dim: int = 512
    heads: int = 8
    layers: int = 4
    longest: int = 256
    bucket: int = 64
    stride: int = 4
    dtype: torch.dtype = torch.bfloat16

    @property
    def num_buckets(self) -> int:
        return -(-self.longest // self.bucket)

    def make_model(self, device: str) -> LanguageModel:
        return LanguageModel(self.dim, self.heads, self.layers, self.longest).to(device, self.dtype).eval()

    def make_requests(self, batch: int, device: str) -> list[list[Tensor]]:
        """Returns batches of rows, the widest first; each row is slightly shorter than the one before it.

        So a dynamic program is not compiled for a batch as wide as it has rows, which would share one symbolic size.
        """
        widths = reversed(range(self.stride, self.longest + 1, self.stride))
        return [
            [torch.randint(256, (max(1, n - i * n // (2 * batch)),), device=device) for i in range(batch)]
            for n in widths
        ]


# ---------------------------------------------------------------------------------------------------------
# subjects
# ---------------------------------------------------------------------------------------------------------


def next_byte(model: LanguageModel, tokens: Tensor) -> Tensor:
    """Returns the next byte of each row."""
    return model.logits(tokens)[:, -1].argmax(-1)


def next_byte_by_hand(model: LanguageModel, tokens: Tensor, last: Tensor) -> Tensor:
    """Returns the next byte of each row of a plain padded batch.

    Args:
        model: The model.
        tokens: The padded batch, `[B, T]`.
        last: The position of each row's last entry, `[B, 1, 1]`.
    """
    logits = model.logits(tokens)
    return logits.gather(1, last.expand(-1, 1, logits.shape[-1])).squeeze(1).argmax(-1)


def pad_by_hand(rows: list[Tensor], multiple: int = 1) -> tuple[Tensor, Tensor]:
    """Returns a plain batch, padded to the next multiple, and the positions of the rows' last entries."""
    batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    last = torch.tensor([len(row) - 1 for row in rows], device=batch.device).view(-1, 1, 1)
    return F.pad(batch, (0, -batch.shape[1] % multiple)), last


@dataclass(frozen=True)
class Subject:
    """A compiled step and its requests.

    Attributes:
        step: The compiled function.
        requests: The arguments of each call.
        count_programs: Returns the number of programs compiled so far.
        graphed: Whether the step uses CUDA graphs.
    """

    step: Callable[..., Tensor]
    requests: list[tuple[Any, ...]]
    count_programs: Callable[[], int]
    graphed: bool = False

    def answer_all(self) -> None:
        """Runs one step per request; the next step overwrites the results of a CUDA graph."""
        for request in self.requests:
            if self.graphed:
                torch.compiler.cudagraph_mark_step_begin()
            self.step(*request)


def make_subjects(model: LanguageModel, requests: list[list[Tensor]], bucket: int) -> dict[str, Subject]:
    """Returns subjects by name; none has compiled anything yet."""
    exact = [(model, *pad_by_hand(rows)) for rows in requests]
    bucketed = [(model, *pad_by_hand(rows, bucket)) for rows in requests]
    padded = [(PaddedTensor.from_tensors(rows, multiple=bucket),) for rows in requests]
    return {
        DYNAMIC: _stock(exact, dynamic=True),
        NO_GRAPHS: _ours(model, padded, dynamic=False),
        BUCKETS: _ours(model, padded, **GRAPHS),
        LIMIT: _stock(bucketed, **GRAPHS),
    }


def _stock(requests: list[tuple[Any, ...]], **options: Any) -> Subject:
    step = torch.compile(copy_function(next_byte_by_hand), fullgraph=True, **options)
    # The counter counts all programs of the process; only this subject runs between two readings.
    return Subject(step, requests, lambda: counters["stats"]["unique_graphs"], "mode" in options)


def _ours(model: LanguageModel, requests: list[tuple[Any, ...]], **options: Any) -> Subject:
    step = desugar.compile(partial(next_byte, model), **options)
    return Subject(step, requests, lambda: len(step.programs), "mode" in options)


# ---------------------------------------------------------------------------------------------------------
# measuring
# ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure_decode(
    rounds: int, serving: Serving | None = None, batches: Sequence[int] = (1, 4, 8), device: str = "cuda"
) -> list[Row]:
    """Measures the mean time of a step over all lengths; counts compiled programs and recorded CUDA graphs."""
    serving, rows = serving or Serving(), []
    model = serving.make_model(device)
    for batch in batches:
        torch.compiler.reset()
        requests = serving.make_requests(batch, device)
        subjects = make_subjects(model, requests, serving.bucket)
        group, calls, counted = f"decode, batch = {batch}", {}, {}
        for name, subject in subjects.items():
            before = subject.count_programs(), count_graphs()
            calls[name] = synced(subject.answer_all)
            after = subject.count_programs(), count_graphs()
            counted[name] = [b - a for a, b in zip(before, after, strict=True)]
        rows += _step_rows(group, calls, len(requests), rounds)
        for number, unit in enumerate((PROGRAMS, GRAPHS_RECORDED)):
            for name, counts in counted.items():
                ratios = {"/ buckets": counts[number] / serving.num_buckets}
                rows.append(count_row(f"{group}: {unit}", name, counts[number], unit, ratios))
    return rows


def _step_rows(group: str, calls: dict[str, Call], steps: int, rounds: int) -> list[Row]:
    timings = time_side_by_side(calls, rounds=rounds)
    rows = []
    for name, t in timings.items():
        ratios = {
            f"{DYNAMIC} / this": timings[DYNAMIC].median / t.median,
            "limit / this": timings[LIMIT].median / t.median,
        }
        rows.append(Row(group, name, per_item(t, steps), ratios, ours="desugar" in name))
    return rows


def count_graphs() -> int:
    """Returns the number of CUDA graphs recorded so far on this device, for all functions."""
    if not torch.cuda.is_available():
        return 0
    from torch._inductor.cudagraph_trees import get_container

    manager = get_container(torch.cuda.current_device()).tree_manager
    nodes, count = list(manager.get_roots()) if manager else [], 0
    while nodes:
        node = nodes.pop()
        count += 1
        nodes += [child for children in node.children.values() for child in children]
    return count
