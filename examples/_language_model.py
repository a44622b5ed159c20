"""The ragged language model that several examples share, and its data: lines of very uneven length."""

import random
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

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
# Model: a causal transformer over bytes, the same code for dense, jagged and padded batches
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
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten(0, 1))

    def logits(self, tokens: Tensor) -> Tensor:
        """The logits of the byte after each byte, `[B, T, 256]`."""
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all the examples."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def train_briefly(steps: int, seed: int, quick: bool) -> tuple[LanguageModel, list[Tensor]]:
    """A model that saw some batches without padding, in eager mode, and the next batch; `quick` makes a tiny one."""
    torch.manual_seed(seed)
    dim, longest = (32, 48) if quick else (128, 256)
    model = LanguageModel(dim=dim, heads=4, layers=2, longest=longest)
    optimizer = make_optimizer(model)
    batches = draw_batches(read_lines(longest), 64, seed)
    for rows in islice(batches, steps):
        model(*jagged(rows)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, next(batches)
