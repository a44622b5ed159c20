"""A decode step over many lengths on a GPU: tables in buckets with CUDA graphs, beside programs for any length.

At small batch a step is launching kernels, not running them; a CUDA graph launches all at once, but only for sizes that
it was recorded for. A `PaddedTensor` has few: the widths of its buckets. Every subject takes the same requests, of all
lengths in turn, and the GPU is waited for at the end of a round of them, since no step needs to know a length.

The limit is the same table padded by hand, for this one model: its lengths a second argument, and no class at all.
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
    """A model, and the requests that it meets: the longest row of a batch has `stride`, 2 `stride`, ... entries."""

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
        """Batches of rows; each row is a little shorter than the one before it."""
        widths = range(self.stride, self.longest + 1, self.stride)
        return [
            [torch.randint(256, (max(1, n - i * n // (2 * batch)),), device=device) for i in range(batch)]
            for n in widths
        ]


# ---------------------------------------------------------------------------------------------------------
# subjects
# ---------------------------------------------------------------------------------------------------------


def next_byte(model: LanguageModel, tokens: Tensor) -> Tensor:
    """What comes after each row's last entry."""
    return model.logits(tokens)[:, -1].argmax(-1)


def next_byte_by_hand(model: LanguageModel, tokens: Tensor, last: Tensor) -> Tensor:
    """The same in a plain table; `last` is the place of each row's last entry, `[B, 1, 1]`."""
    logits = model.logits(tokens)
    return logits.gather(1, last.expand(-1, 1, logits.shape[-1])).squeeze(1).argmax(-1)


def by_hand(rows: list[Tensor], multiple: int = 1) -> tuple[Tensor, Tensor]:
    """A plain table, its width the next multiple, and the places of the last entries."""
    table = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    last = torch.tensor([len(row) - 1 for row in rows], device=table.device).view(-1, 1, 1)
    return F.pad(table, (0, -table.shape[1] % multiple)), last


@dataclass(frozen=True)
class Subject:
    """What answers requests."""

    step: Callable[..., Tensor]
    requests: list[tuple[Any, ...]]
    count_programs: Callable[[], int]
    graphed: bool = False

    def answer_all(self) -> None:
        """One step for each request; what a graph gives is gone with the next step."""
        for request in self.requests:
            if self.graphed:
                torch.compiler.cudagraph_mark_step_begin()
            self.step(*request)


def make_subjects(model: LanguageModel, requests: list[list[Tensor]], bucket: int) -> dict[str, Subject]:
    """Name -> a subject that has compiled nothing yet."""
    exact = [(model, *by_hand(rows)) for rows in requests]
    tables = [(model, *by_hand(rows, bucket)) for rows in requests]
    padded = [(PaddedTensor.from_tensors(rows, multiple=bucket),) for rows in requests]
    return {
        DYNAMIC: _stock(exact, dynamic=True),
        NO_GRAPHS: _ours(model, padded, dynamic=False),
        BUCKETS: _ours(model, padded, **GRAPHS),
        LIMIT: _stock(tables, **GRAPHS),
    }


def _stock(requests: list[tuple[Any, ...]], **options: Any) -> Subject:
    step = torch.compile(copy_function(next_byte_by_hand), fullgraph=True, **options)
    # A counter of all programs: this subject is the only one that runs between two readings.
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
    """Times of one step, the mean over all lengths; programs compiled and CUDA graphs recorded for all of them."""
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
            for name, found in counted.items():
                ratios = {"/ buckets": found[number] / serving.num_buckets}
                rows.append(count_row(f"{group}: {unit}", name, found[number], unit, ratios))
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
    """CUDA graphs that are recorded now, for all functions of this device."""
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
