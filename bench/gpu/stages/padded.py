"""Encodes a prefix again at each step, over many lengths: padded batches in buckets with CUDA graphs.

Each step computes the whole prefix, and returns the next byte of each row. A server would keep keys and values in a
cache; here there are none. At small batch, launching kernels takes more time than running them. A CUDA graph launches
all kernels at once, but only for the sizes with which it was recorded. A `PaddedTensor` has few sizes: the widths of
its buckets. The rival is one dynamic program for all lengths. Every subject gets the same requests, of all lengths in
turn. The benchmark synchronizes with the GPU at the end of a round, since no step reads a length on the host.

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
from bench.gpu.device import Call, Device
from bench.gpu.run import Run, Turns
from bench.timing import copy_function
from examples._language_model import LanguageModel
from subclasses.ragged import PaddedTensor

DYNAMIC = "exact widths, torch.compile(dynamic=True)"
BUCKETS = "PaddedTensor in buckets, CUDA graphs, desugar.compile"
NO_GRAPHS = "PaddedTensor in buckets, desugar.compile"
LIMIT = "limit: padded by hand, CUDA graphs, torch.compile"
PROGRAMS, GRAPHS_RECORDED, NUM_BUCKETS = "programs compiled", "graphs recorded", "buckets"
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


def make_subjects(
    device: Device, model: LanguageModel, requests: list[list[Tensor]], bucket: int
) -> dict[str, Subject]:
    """Returns subjects by name; none has compiled anything yet."""
    exact = [(model, *pad_by_hand(rows)) for rows in requests]
    bucketed = [(model, *pad_by_hand(rows, bucket)) for rows in requests]
    padded = [(PaddedTensor.from_tensors(rows, multiple=bucket),) for rows in requests]
    return {
        DYNAMIC: _stock(device, exact, dynamic=True),
        NO_GRAPHS: _ours(device, model, padded, dynamic=False),
        BUCKETS: _ours(device, model, padded, **GRAPHS),
        LIMIT: _stock(device, bucketed, **GRAPHS),
    }


def _stock(device: Device, requests: list[tuple[Any, ...]], **options: Any) -> Subject:
    step = device.compile(torch.compile, copy_function(next_byte_by_hand), fullgraph=True, **options)
    # The counter counts all programs of the process; only this subject runs between two readings.
    return Subject(step, requests, lambda: counters["stats"]["unique_graphs"], "mode" in options)


def _ours(device: Device, model: LanguageModel, requests: list[tuple[Any, ...]], **options: Any) -> Subject:
    step: Any = device.compile(desugar.compile, partial(next_byte, model), **options)
    return Subject(step, requests, lambda: len(step.programs), "mode" in options)


# ---------------------------------------------------------------------------------------------------------
# measuring
# ---------------------------------------------------------------------------------------------------------

SMALL = Serving(dim=16, heads=2, layers=1, longest=24, bucket=8, stride=3, dtype=torch.float64)
WITHOUT_MASK = "PaddedTensor in buckets, CUDA graphs, causal attention without a mask"


def group_of(batch: int) -> str:
    return f"encoding a prefix again, batch = {batch}"


@torch.no_grad()
def measure_padded(run: Run, serving: Serving | None = None, batches: Sequence[int] | None = None) -> None:
    """Measures the mean time of a step over all lengths; counts compiled programs and recorded CUDA graphs."""
    serving = serving or run.device.pick(Serving(), SMALL)
    for batch in batches or run.device.pick((4, 1), (2,)):
        torch.compiler.reset()
        model = serving.make_model(run.device.name)
        requests = serving.make_requests(batch, run.device.name)
        subjects = make_subjects(run.device, model, requests, serving.bucket)
        group = group_of(batch)
        makers = {
            name: partial(_warm_and_count, run, group, name, subject, serving.num_buckets)
            for name, subject in subjects.items()
        }
        run.line(group, WITHOUT_MASK, error="does not exist yet")
        run.compare(group, makers, Turns(DYNAMIC, items=len(requests), host=True, seconds=4.0))


def _warm_and_count(run: Run, group: str, name: str, subject: Subject, buckets: int) -> Call:
    """Runs all steps three times, and writes how many programs were compiled and graphs recorded meanwhile."""
    before = subject.count_programs(), count_graphs()
    for _ in range(3):
        subject.answer_all()
    run.device.synchronize()
    after = subject.count_programs(), count_graphs()
    for figure, a, b in zip((PROGRAMS, GRAPHS_RECORDED), before, after, strict=True):
        run.number(group, name, figure, b - a, figure)
    run.number(group, name, NUM_BUCKETS, buckets, NUM_BUCKETS)
    return subject.answer_all


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
