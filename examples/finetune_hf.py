"""Train a Llama of transformers from random weights in three ways, and compare seconds, memory and losses.

The data are the paragraphs of the Python standard library's own source, one token for each word: most are short, some
are long, so about a quarter of a padded table is real. Three ways lay out a batch:

- padded: an ordinary collator fills a table; `attention_mask` and labels of -100 mark its padding.
- flattened: the rows form one row `[1, total]`, as in transformers' `DataCollatorWithFlattening`. Positions start
  again at each paragraph, and a mask `[1, 1, total, total]` keeps paragraphs apart: PyTorch has no attention kernel
  for packed rows on the CPU.
- ragged: `RaggedCollator` returns `JaggedTensor`s, and the call of the model stays as it is.

All ways start from the same weights and see the same batches. They take turns step by step in one process, in an order
shuffled at each step. A step is forward, backward and update. Making a batch is not timed: a data loader does it
meanwhile. The script fails if the losses of a step differ by more than 1e-4 of each other.

Memory is measured in a process for each way, on Linux: how far the steps raise its resident memory at most, above
weights and optimizer. The first step, which compiles, is timed there, too, without the caches of earlier processes. It
is forward and backward.

    python examples/finetune_hf.py
    python examples/finetune_hf.py --compile
    python examples/finetune_hf.py --grouped  # batches of similar lengths, as group_by_length makes them
    python examples/finetune_hf.py --batch 8 --shortest 64 --longest 64  # rows of one length
"""

import argparse
import math
import os
import random
import re
import sysconfig
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, product
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

import desugar
from subclasses.ragged.hugging_face import RaggedCollator

IGNORED = -100  # the label that transformers leaves out of the loss
RELATIVE_TOLERANCE = 1e-4
HEADER = f"{'':20} step, ms  of padded  of flattened  memory, MiB  of padded  of flattened  first step, s  last loss"
OPTIONS = {"layers": 2, "width": 256, "heads": 4, "vocabulary": 4096}
OPTIONS |= {"batch": 16, "shortest": 2, "longest": 400, "steps": 12, "seed": 0}

Example = dict[str, list[int]]
Batch = dict[str, Any]

# ---- the data: no download, the interpreter brought it along --------------------------------------------------------


def read_examples(vocabulary: int, shortest: int, longest: int) -> list[Example]:
    """Paragraphs of the standard library's modules, cut off at `longest` tokens; padding has token 0 for itself."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in sorted(stdlib.glob("*.py")))
    words = (re.findall(r"\w+|[^\w ]", part)[:longest] for text in texts for part in text.split("\n\n"))
    rows = ([1 + zlib.crc32(word.encode()) % (vocabulary - 1) for word in row] for row in words)
    return [{"input_ids": row} for row in rows if len(row) >= shortest]


def draw_batches(options: argparse.Namespace) -> list[list[Example]]:
    """A batch of random paragraphs for each step; with `--grouped`, of paragraphs of similar lengths."""
    examples = read_examples(options.vocabulary, options.shortest, options.longest)
    rng = random.Random(options.seed)
    drawn = [rng.sample(examples, options.batch) for _ in range(options.steps)]
    if options.grouped:
        ordered = iter(sorted(chain.from_iterable(drawn), key=length))
        drawn = [list(islice(ordered, options.batch)) for _ in range(options.steps)]
    return drawn


def length(example: Example) -> int:
    return len(example["input_ids"])


# ---- the three ways -------------------------------------------------------------------------------------------------


def pad(examples: list[Example]) -> Batch:
    """A table `[B, T]`, as an ordinary collator makes it."""
    rows = [torch.tensor(example["input_ids"]) for example in examples]
    tokens = pad_sequence(rows, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, IGNORED)}


def flatten(examples: list[Example]) -> Batch:
    """One row `[1, total]`; no token sees another paragraph, and none predicts the first token of the next one."""
    lengths = [length(example) for example in examples]
    tokens = torch.tensor([token for example in examples for token in example["input_ids"]])
    positions = torch.cat([torch.arange(n) for n in lengths])
    paragraph = torch.repeat_interleave(torch.tensor(lengths))
    seen = (paragraph[:, None] == paragraph).tril()
    return {
        "input_ids": tokens[None],
        "position_ids": positions[None],
        "attention_mask": torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None],
        "labels": tokens.masked_fill(positions == 0, IGNORED)[None],
    }


COLLATORS = {"padded": pad, "flattened": flatten, "ragged": RaggedCollator(labels="input_ids")}
STOCK = partial(torch.compile, dynamic=True)
COMPILERS = {"padded": STOCK, "flattened": STOCK, "ragged": desugar.compile}


@dataclass
class Way:
    """A kind of batch, a model with an optimizer of its own, and the losses, seconds and MiB of its steps.

    `first` is the seconds of the first forward and backward in a new process.
    """

    kind: str
    backend: str | None
    model: nn.Module
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: float = 0.0
    first: float = 0.0

    def __post_init__(self):
        self.name = f"{self.kind}, compiled" if self.backend else self.kind
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.call = COMPILERS[self.kind](self.model, backend=self.backend) if self.backend else self.model

    def warm_up(self, *batches: list[Example]) -> None:
        """Forward and backward without an update, which compiles, and leaves the weights as they are."""
        for examples in batches:
            self.call(**COLLATORS[self.kind](examples)).loss.backward()
            self.optimizer.zero_grad()

    def train_step(self, examples: list[Example]) -> None:
        batch = COLLATORS[self.kind](examples)
        start = time.perf_counter()
        loss = self.call(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - start)


def make_way(backend: str | None, kind: str, options: argparse.Namespace) -> Way:
    """A way with the weights that all ways begin with."""
    torch.manual_seed(options.seed)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=options.width * 8 // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        max_position_embeddings=options.longest,
        pad_token_id=0,
        use_cache=False,
    )
    return Way(kind, backend, LlamaForCausalLM(config))


# ---- measuring ------------------------------------------------------------------------------------------------------


def train(ways: list[Way], batches: list[list[Example]], seed: int) -> None:
    """Lets the ways take turns in each step, after a warm-up with a full and a smaller batch."""
    turns = random.Random(seed)
    for way in ways:
        way.warm_up(batches[0], sorted(batches[0], key=length)[:-3])
    for examples in batches:
        for way in turns.sample(ways, len(ways)):
            way.train_step(examples)


def measure_process(backend: str | None, kind: str, options: argparse.Namespace) -> tuple[float, float]:
    """The MiB by which training steps raise the resident memory of this process, and the seconds of its first step."""
    way, batches = make_way(backend, kind, options), draw_batches(options)
    short = sorted(batches[0], key=length)  # a second batch size is compiled before the measurement
    with TemporaryDirectory() as caches:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = caches
        start = time.perf_counter()
        way.warm_up(short[:2])
        first = time.perf_counter() - start
        way.warm_up(short[:3])
        way.train_step(short[:2])  # makes the state of the optimizer
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        before = resident("VmRSS")
        for examples in batches:
            way.train_step(examples)
        return resident("VmHWM") - before, first


def resident(name: str) -> float:
    """Resident memory of this process in MiB: `VmRSS` now, `VmHWM` at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def check_agreement(ways: list[Way]) -> None:
    """Ends the script if the losses of two ways differ."""
    for way, step in product(ways[1:], range(len(ways[0].losses))):
        got, expected = way.losses[step], ways[0].losses[step]
        if not abs(got - expected) <= RELATIVE_TOLERANCE * abs(expected):  # a NaN fails too
            names = f"{got:.6f} ({way.name}) but {expected:.6f} ({ways[0].name})"
            raise SystemExit(f"The ways disagree: at step {step} the loss is {names}.")


def print_table(
    ways: list[Way], batches: list[list[Example]], typical: Callable[[list[float]], float]
) -> None:
    """One line for each way; eager ways are compared with eager ones, and compiled ways with compiled ones."""
    lengths = [[length(example) for example in examples] for examples in batches]
    real = sum(map(sum, lengths)) / sum(len(rows) * max(rows) for rows in lengths)
    print(
        f"{len(batches)} batches of {len(lengths[0])} paragraphs; a padded table is {real:.0%} real; ", end=""
    )
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s)")
    print(HEADER)
    for way in ways:
        alike = {rival.kind: rival for rival in ways if rival.backend == way.backend}
        rivals = alike["padded"], alike["flattened"]
        times = [typical(way.seconds) / typical(rival.seconds) for rival in rivals]
        memories = [way.memory / (rival.memory or math.nan) for rival in rivals]
        speed = f"{1e3 * typical(way.seconds):8.1f}  {times[0]:9.2f}  {times[1]:12.2f}"
        memory = f"{way.memory:11.1f}  {memories[0]:9.2f}  {memories[1]:12.2f}"
        print(f"{way.name:20} {speed}  {memory}  {way.first:13.1f}  {way.losses[-1]:9.5f}")


def main() -> None:
    """Trains in all ways, fails if their losses differ, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in OPTIONS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    compiled = {"nargs": "?", "const": "inductor", "metavar": "BACKEND"}
    parser.add_argument("--compile", **compiled, help="adds three compiled ways; default: inductor")
    parser.add_argument("--grouped", action="store_true", help="batches of paragraphs of similar lengths")
    options = parser.parse_args()
    if options.batch < 4:
        parser.error(
            f"--batch: expected at least 4, since a smaller batch warms up, too; got {options.batch}"
        )
    kinds = [*product(dict.fromkeys([None, options.compile]), COLLATORS)]
    ways, batches = [make_way(*kind, options) for kind in kinds], draw_batches(options)
    train(ways, batches, options.seed)
    check_agreement(ways)
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for way, kind in zip(ways, kinds, strict=True):
            way.memory, way.first = pool.submit(measure_process, *kind, options).result()
    print_table(ways, batches, mean if options.grouped else median)  # grouped batches differ in size


if __name__ == "__main__":
    main()
