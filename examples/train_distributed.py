"""Train low-rank adapters of an int8 language model on any number of processes.

The data and the model come from `train_ragged_lm.py`. In each step `TokenBatchSampler` gives every rank about as many
tokens as the others. `weighted_loss` makes the averaged gradient equal to the gradient of the joint batch. So the
losses are the same on any number of ranks, except for rounding.

The weights of the linear layers are int8 and frozen (here random; a real job would load trained ones first). Beside
each is a trained adapter of two factors; embeddings and norms are trained too. Each block is compiled by itself,
then given to `fully_shard` (FSDP2). The machine determines the device and the backend of the group.

A checkpoint may be loaded by another number of ranks. The job then compares its loss on held-out lines with the saved
loss. `make train-distributed` saves on two ranks and goes on with one:

    torchrun --standalone --nproc-per-node 2 examples/train_distributed.py --steps 30 --save demo-out/checkpoint
    torchrun --standalone --nproc-per-node 1 examples/train_distributed.py --steps 40 --load demo-out/checkpoint
"""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import typer
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import desugar
from _language_model import Batch, LanguageModel, jagged, read_lines
from _options import Quick, Seed, fail
from _ranks import say, start_rank
from subclasses.int8 import Int8WeightOnlyConfig, quantize_
from subclasses.ragged import TokenBatchSampler, mean_over_ranks, weighted_loss

RELATIVE_TOLERANCE = 1e-4  # of the held-out loss before and after a checkpoint
LONGEST, RANK_OF_ADAPTERS, LEARNING_RATE = 256, 8, 3e-3


class Adapted(nn.Module):
    """A frozen linear layer beside a trained product of two factors, which is 0 at first."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(linear.in_features, RANK_OF_ADAPTERS) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(RANK_OF_ADAPTERS, linear.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x @ self.down @ self.up


def make_model(quick: bool, seed: int, device: torch.device) -> LanguageModel:
    """The model: int8 and adapted, its blocks compiled, its parameters sharded over all ranks."""
    torch.manual_seed(seed)  # on the CPU, so that all devices and numbers of ranks have the same weights
    model = LanguageModel(dim=32 if quick else 128, heads=4, layers=2, longest=LONGEST)
    quantize_(model, Int8WeightOnlyConfig())
    for module in [*model.modules()]:
        for name, layer in [*module.named_children()]:
            if isinstance(layer, nn.Linear):
                setattr(module, name, Adapted(layer))
    model.to(device)
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for number, block in enumerate(model.blocks):
        model.blocks[number] = desugar.compile(block, backend="eager" if quick else "inductor")
        fully_shard(model.blocks[number], mesh=mesh)
    return fully_shard(model, mesh=mesh)


@dataclass
class Progress:
    """How far a job is."""

    epoch: int = 0
    step: int = 0  # of the epoch
    steps: int = 0  # of all epochs


def make_loader(lines: list[Tensor], tokens: int, seed: int) -> DataLoader[Batch]:
    """Batches for this rank, of steps of `tokens` on all ranks together."""
    sampler = TokenBatchSampler([len(line) - 1 for line in lines], tokens_per_step=tokens, seed=seed)
    return DataLoader(lines, batch_sampler=sampler, collate_fn=jagged)


@dataclass
class Job:
    """A model, its data, and its progress."""

    model: nn.Module
    loader: DataLoader[Batch]
    held_out: DataLoader[Batch]
    device: torch.device
    done: Progress = field(default_factory=Progress)

    def __post_init__(self):
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE)

    def batches(self) -> Iterator[tuple[Batch, list[int]]]:
        """This rank's batches without end, each with the tokens of every rank; `done` counts them."""
        sampler, done = self.loader.batch_sampler, self.done
        while True:
            sampler.set_epoch(done.epoch, start=done.step)
            for batch, tokens in zip(self.loader, sampler.tokens_per_rank().tolist(), strict=True):
                done.step, done.steps = done.step + 1, done.steps + 1
                yield batch, tokens
            done.epoch, done.step = done.epoch + 1, 0

    def loss_of(self, batch: Batch) -> tuple[Tensor, int]:
        """The sum of the losses of this rank's tokens, and how many these are."""
        tokens, targets = (part.to(self.device) for part in batch)
        count = tokens.values.shape[0]
        return self.model(tokens, targets) * count, count

    def train(self, steps: int, every: int) -> None:
        """Trains until there are `steps` steps; reports every so many, and its first report is of compiling too."""
        start, seen = time.perf_counter(), []
        for batch, tokens in islice(self.batches(), max(steps - self.done.steps, 0)):
            loss_sum, count = self.loss_of(batch)
            weighted_loss(loss_sum, count).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            seen.append(tokens)
            if self.done.steps % every == 0:
                loss = mean_over_ranks(loss_sum, count).item()
                speed = sum(map(sum, seen)) / (time.perf_counter() - start)
                spread = max(max(tokens) - min(tokens) for tokens in seen)
                say(f"{self.done.steps:5} {loss:10.6f} {speed:10,.0f} {max(map(max, seen)):15,} {spread:15}")
                start, seen = time.perf_counter(), []

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss over all held-out lines, which the ranks share."""
        losses, counts = zip(*map(self.loss_of, self.held_out), strict=True)
        return mean_over_ranks(torch.stack(losses).sum(), sum(counts)).item()

    def state(self, **more: Any) -> dict[str, Any]:
        """The contents of a checkpoint; each rank has its shards of the tensors."""
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"weights": weights, "moments": moments, "done": asdict(self.done), **more}

    def save(self, folder: Path) -> None:
        """Saves a checkpoint, with the loss on held-out lines and the number of ranks."""
        loss = self.evaluate()
        dcp.save(self.state(held_out=loss, ranks=dist.get_world_size()), checkpoint_id=folder)
        say(f"saved after {self.done.steps} steps; loss on held-out lines {loss:.6f}")

    def load(self, folder: Path) -> None:
        """Goes on from a checkpoint of any number of ranks; fails if held-out lines have another loss than before."""
        state = self.state(held_out=0.0, ranks=0)
        dcp.load(state, checkpoint_id=folder)
        parts = {"model_state_dict": state["weights"], "optim_state_dict": state["moments"]}
        set_state_dict(self.model, self.optimizer, **parts)
        self.done, saved, loss = Progress(**state["done"]), state["held_out"], self.evaluate()
        say(
            f"goes on after {self.done.steps} steps; ranks then {state['ranks']}, now {dist.get_world_size()}"
        )
        say(f"loss on held-out lines {loss:.6f}, and when it was saved {saved:.6f}")
        if not math.isclose(loss, saved, rel_tol=RELATIVE_TOLERANCE):
            fail("The checkpoint does not continue: the losses on held-out lines differ.")


def main(  # noqa: PLR0913 - the command line
    steps: Annotated[int, typer.Option(help="Steps in all, with the steps of a loaded checkpoint.")] = 40,
    tokens: Annotated[int, typer.Option(help="Tokens of a step, on all ranks together.")] = 4096,
    every: Annotated[int, typer.Option(help="Steps between two lines of the report.")] = 10,
    save: Annotated[Path | None, typer.Option(help="Folder of the checkpoint that is saved.")] = None,
    load: Annotated[Path | None, typer.Option(help="Folder of the checkpoint to go on from.")] = None,
    quick: Quick = False,
    seed: Seed = 0,
) -> None:
    """Train adapters of an int8 language model on all ranks."""
    device = start_rank()
    lines = read_lines(LONGEST)
    lines, held_out = (lines[:400], lines[-100:]) if quick else (lines[:-1000], lines[-1000:])
    loaders = make_loader(lines, tokens, seed), make_loader(held_out, tokens, seed)
    job = Job(make_model(quick, seed, device), *loaders, device)
    say(f"ranks: {dist.get_world_size()}, on {device.type}; {len(lines):,} lines, {tokens:,} tokens a step")
    if load is not None:
        job.load(load)
    say(" step       loss   tokens/s    at most a rank  ranks differ by")
    job.train(steps, every)
    if save is not None:
        job.save(save)
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
