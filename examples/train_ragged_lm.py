"""Train a small language model on lines of very uneven length, in five ways, and compare.

The data are the lines of the Python standard library's own source: most are short, some are long, so a
batch of random lines that is padded to a rectangle is about half padding. A `JaggedTensor` holds the same
batch without it. The model below is written once; what differs between the ways is how a batch is laid out
(`dense` or `jagged`) and what runs the model (eager, stock `torch.compile`, `desugar.compile`).

All five start from the same weights, see the same batches, and take turns step by step in one process, in
an order shuffled at each step, so that noise hits all alike. Making a batch is not timed: a data loader
would do it meanwhile. Two batches, a full and a short one, are warm-up in every way: they are run forward
and backward without an update, which compiles what is to be compiled, and are not timed either.

Only real tokens count in the loss, so its value does not depend on the layout, and the script fails if the
ways disagree by more than float32 rounding (`RELATIVE_TOLERANCE`).

    python examples/train_ragged_lm.py --steps 60 --out demo-out/train_ragged_lm.png
"""

import copy
import random
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import desugar
from _report import Result, check_agreement, print_table, save_picture, tick_progress
from subclasses.ragged import JaggedTensor

IGNORED = -100  # the target that F.cross_entropy leaves out by default

# ---------------------------------------------------------------------------------------------------------
# Data: one row per line, "\n" + line predicts line + "\n"
# ---------------------------------------------------------------------------------------------------------

Batch = tuple[Tensor, Tensor]


def read_lines(longest: int) -> list[Tensor]:
    """The non-blank lines of the standard library's modules as byte tensors, cut off at `longest`."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    lines = (line for path in sorted(stdlib.glob("*.py")) for line in path.read_bytes().splitlines())
    return [torch.tensor(list(b"\n" + line[:longest] + b"\n")) for line in lines if line.strip()]


def draw_batches(lines: list[Tensor], batch: int, seed: int) -> Iterator[list[Tensor]]:
    """Batches of random lines without end. An epoch's last batch is shorter, as with any data loader."""
    rng = random.Random(seed)
    while True:
        epoch = rng.sample(lines, 10 * batch - batch // 3)
        yield from (epoch[i : i + batch] for i in range(0, len(epoch), batch))


def dense(rows: list[Tensor]) -> Batch:
    """Inputs and targets as rectangles `[B, T]`, padded to the longest row."""
    tokens = pad_sequence([row[:-1] for row in rows], batch_first=True)
    return tokens, pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=IGNORED)


def jagged(rows: list[Tensor]) -> Batch:
    """Inputs and targets as jagged tensors of outer size `[B, T]`; they share their offsets."""
    tokens = JaggedTensor.from_tensors([row[:-1] for row in rows])
    targets = torch.cat([row[1:] for row in rows])
    return tokens, JaggedTensor(targets, tokens.offsets, max_length=tokens.shape[1])


# ---------------------------------------------------------------------------------------------------------
# Model: a causal transformer over bytes, the same code for dense and jagged batches
# ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, both with a residual connection."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split_heads(part) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def split_heads(self, x: Tensor) -> Tensor:
        """`[B, T, D]` to `[B, heads, T, D / heads]`."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class LanguageModel(nn.Module):
    """Predicts each next byte; returns the mean cross entropy over the real tokens."""

    def __init__(self, dim: int, heads: int, layers: int, longest: int):
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        self.position = nn.Embedding(longest + 1, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))


# ---------------------------------------------------------------------------------------------------------
# The five ways
# ---------------------------------------------------------------------------------------------------------


@dataclass
class Way:
    """A layout, a model with an optimizer of its own, and what was measured."""

    name: str
    layout: Callable[[list[Tensor]], Batch]
    model: nn.Module
    compiled: Callable[[Tensor, Tensor], Tensor]
    programs: Callable[[], int]
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, nesterov=True)

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
    quick: Annotated[bool, typer.Option(help="A tiny model, and graphs run without Inductor.")] = False,
    seed: Annotated[int, typer.Option(help="Of the weights and of the batches.")] = 0,
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


if __name__ == "__main__":
    typer.run(main)
