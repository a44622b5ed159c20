"""Train a small language model on lines of very uneven length, in five ways, and compare.

The data are the lines of the Python standard library's own source: most are short, some are long, so a
batch of random lines that is padded to a rectangle is about half padding. A `JaggedTensor` holds the same
batch without it. The model (`_language_model.py`) is written once. The ways differ in the layout of a batch
(`dense` or `jagged`) and in how they run the model (eager, stock `torch.compile`, `desugar.compile`).

All five start from the same weights and see the same batches. They take turns step by step in one process,
in an order shuffled at each step, so that noise hits all alike. Making a batch is not timed: a data loader
would do it meanwhile. Two batches, a full and a short one, warm up each way: they run forward and backward
without an update, which compiles the programs, and are not timed either.

Only real tokens count in the loss, so its value does not depend on the layout. The script fails if the ways
disagree by more than float32 rounding (`RELATIVE_TOLERANCE`).

Afterwards the trained model continues prompts of 32 lengths, as a `PaddedTensor` (`generate_ragged_lm.py`).
It is also quantized to int8, and the script prints bytes, speed and loss beside float
(`quantize_ragged_lm.py`).

    python examples/train_ragged_lm.py --steps 60 --out demo-out/train_ragged_lm.png
"""

import copy
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

import desugar
from _language_model import Batch, LanguageModel, dense, draw_batches, jagged, make_optimizer, read_lines
from _options import Quick, Seed
from _report import Result, check_agreement, print_table, save_picture, tick_progress
from generate_ragged_lm import generate_by_bucket
from quantize_ragged_lm import compare_quantized

# ---------------------------------------------------------------------------------------------------------
# The five ways
# ---------------------------------------------------------------------------------------------------------


@dataclass
class Way:
    """A layout, a model with an optimizer of its own, and its losses and times."""

    name: str
    layout: Callable[[list[Tensor]], Batch]
    model: nn.Module
    compiled: Callable[[Tensor, Tensor], Tensor]
    programs: Callable[[], int]
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self):
        self.optimizer = make_optimizer(self.model)

    def warm_up(self, rows: list[Tensor]) -> None:
        """Forward and backward without an update: compiles, and leaves the weights as they are."""
        self.compiled(*self.layout(rows)).backward()
        self.optimizer.zero_grad()

    def train_step(self, rows: list[Tensor]) -> None:
        tokens, targets = self.layout(rows)
        start = time.perf_counter()
        loss = self.compiled(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - start)


class CountingBackend:
    """A backend for `torch.compile` that counts the programs which it hands to another one."""

    def __init__(self, name: str):
        self.backend = torch._dynamo.lookup_backend(name)
        self.programs = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        compiled_fn = self.backend(gm, inputs)
        self.programs += 1  # only now: Dynamo may give an attempt up and start again
        return compiled_fn


def eager_way(name: str, layout: Callable, model: nn.Module) -> Way:
    return Way(name, layout, model, model, lambda: 0)


def stock_way(name: str, layout: Callable, model: nn.Module, backend: str) -> Way:
    counting = CountingBackend(backend)
    compiled = torch.compile(model, backend=counting, fullgraph=True)
    return Way(name, layout, model, compiled, lambda: counting.programs)


def desugar_way(name: str, layout: Callable, model: nn.Module, backend: str) -> Way:
    compiled = desugar.compile(model, backend=backend)
    return Way(name, layout, model, compiled, lambda: len(compiled.programs))


def make_ways(model: nn.Module, stock_backend: str, desugar_backend: str) -> list[Way]:
    """The five ways, each with a copy of `model` of its own."""
    return [
        eager_way("dense, eager", dense, copy.deepcopy(model)),
        stock_way("dense, torch.compile", dense, copy.deepcopy(model), stock_backend),
        eager_way("jagged, eager", jagged, copy.deepcopy(model)),
        stock_way("jagged, torch.compile", jagged, copy.deepcopy(model), stock_backend),
        desugar_way("jagged, desugar.compile", jagged, copy.deepcopy(model), desugar_backend),
    ]


# ---------------------------------------------------------------------------------------------------------
# Training, step by step in turns
# ---------------------------------------------------------------------------------------------------------


def train(ways: list[Way], lines: list[Tensor], steps: int, batch: int, seed: int) -> list[list[int]]:
    """Warms up, then lets the ways take turns; returns the lengths of the rows in each timed step."""
    batches, turns = draw_batches(lines, batch, seed), random.Random(seed)
    full, short = next(batches), sorted(next(batches), key=len)[: batch // 2]
    for way in tick_progress(ways, "warm-up"):
        way.warm_up(full)
        way.warm_up(short)  # other sizes throughout, so that all of them become dynamic now
    lengths = []
    for rows in tick_progress(islice(batches, steps), "training", total=steps):
        lengths.append([len(row) - 1 for row in rows])
        for way in turns.sample(ways, len(ways)):
            way.train_step(rows)
    return lengths


def main(
    steps: Annotated[int, typer.Option(help="Timed training steps in each way.")] = 60,
    batch: Annotated[int, typer.Option(help="Lines in a batch.")] = 64,
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("demo-out/train_ragged_lm.png"),
    quick: Quick = False,
    seed: Seed = 0,
) -> None:
    """Train one model in five ways; print a table, save a picture, fail if the losses disagree."""
    torch.manual_seed(seed)
    dim, layers, longest = (32, 2, 48) if quick else (128, 2, 256)
    model = LanguageModel(dim=dim, heads=4, layers=layers, longest=longest)
    stock_backend, desugar_backend = ("aot_eager", "eager") if quick else ("inductor", "inductor")
    ways = make_ways(model, stock_backend, desugar_backend)
    lengths = train(ways, read_lines(longest), steps, batch, seed)
    tokens = sum(map(sum, lengths))
    results = [Result(way.name, way.losses, way.seconds, tokens, way.programs()) for way in ways]
    print_table(results, lengths)
    save_picture(results, out)
    check_agreement(results)
    generate_by_bucket(ways[-1].model, desugar_backend)
    compare_quantized(
        ways[-1].model, next(draw_batches(read_lines(longest), batch, seed + 1)), desugar_backend
    )


if __name__ == "__main__":
    typer.run(main)
