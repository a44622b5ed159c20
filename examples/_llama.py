"""The model of `serve_llm.py` in plain PyTorch: a small Llama over bytes, requests, and one request alone."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _language_model import read_lines

HEAD_DIM, GROUP = 32, 2  # two heads of queries share a head of keys and values
VOCABULARY = 256

# ---------------------------------------------------------------------------------------------------------
# Model: attention is a function that the caller passes, since the caller has the cache
# ---------------------------------------------------------------------------------------------------------

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Takes the number of a layer and its new queries, keys and values; returns the result of attention.

Queries and the result are `[B, T, heads, D]`, keys and values `[B, T, heads / GROUP, D]`.
"""


def attention(q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
    """Grouped attention over tensors `[B, T, heads, D]`."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **mask).transpose(1, 2)


def make_rotation(positions: int) -> Tensor:
    """The rotary embedding's cosines and sines: `[2, positions, HEAD_DIM / 2]`."""
    frequencies = 10000 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.outer(torch.arange(positions), frequencies)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotates the two halves of each head `[B, T, heads, D]` by the angles of its position."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Layer(nn.Module):
    """Grouped attention and a gated feed-forward layer, both with a residual connection."""

    def __init__(self, width: int):
        super().__init__()
        self.sizes = [width, width // GROUP, width // GROUP]
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = (nn.Linear(width, n, bias=False) for n in (sum(self.sizes), width))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor, number: int, attend: Attend) -> Tensor:
        parts = self.qkv(self.norm1(x)).split(self.sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)) for part in parts)
        mixed = attend(number, rotate(q, rotation), rotate(k, rotation), v)
        x = x + self.out(mixed.flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Predicts the token after the last one of each row."""

    rotation: Tensor

    def __init__(self, width: int, layers: int, positions: int):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("rotation", make_rotation(positions))

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits `[B, VOCABULARY]` for tokens `[B, T]` at positions `[T]` or `[B, T]`."""
        x, rotation = self.embedding(tokens), self.rotation[:, positions].unsqueeze(-2)
        for number, layer in enumerate(self.layers):
            x = layer(x, rotation, number, attend)
        return self.head(self.norm(x)[:, -1])


# ---------------------------------------------------------------------------------------------------------
# Requests
# ---------------------------------------------------------------------------------------------------------


@dataclass
class Request:
    """A prompt that arrives before some decode step, and the answer to it, `size` tokens long in the end."""

    prompt: Tensor
    size: int
    arrives: int
    answer: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)  # of each token's logit over the next best one

    def margin_at_difference(self, other: "Request") -> float | None:
        """The margin of the first token at which another answer departs from this one; None if none does."""
        pairs = zip(self.answer, other.answer, self.margins, strict=True)
        return next((margin for own, theirs, margin in pairs if own != theirs), None)


def make_requests(count: int, prompt: int, answer: int, seed: int) -> list[Request]:
    """Prompts are lines of the standard library, to `prompt` bytes; answers have 1 to `answer` tokens."""
    rng, requests, arrives = random.Random(seed), [], 0
    for line in rng.sample(read_lines(prompt - 1), count):
        requests.append(Request(line[:-1], rng.randint(1, answer), arrives))
        arrives += rng.randrange(4)
    return requests


def answer_alone(model: Llama, requests: list[Request]) -> None:
    """Answers one request after the other."""
    for request in requests:
        answer_one(model, request)


def answer_one(model: Llama, request: Request) -> None:
    """Answers one request in eager mode, with keys and values in tensors that grow."""
    past: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in past:
            k, v = torch.cat([past[layer][0], k], dim=1), torch.cat([past[layer][1], v], dim=1)
        past[layer] = k, v
        return attention(q, k, v, is_causal=q.shape[1] > 1)

    tokens, positions = request.prompt[None], torch.arange(len(request.prompt))
    for _ in range(request.size):
        best, numbers = model(tokens, positions, attend).topk(2)
        tokens, positions = numbers[:, :1], positions[-1:] + 1
        request.answer.append(int(tokens))
        request.margins.append(float(best[0, 0] - best[0, 1]))


Answer = Callable[[list[Request]], None]


def time_answers(answer: Answer, requests: list[Request], runs: int) -> tuple[list[Request], list[float]]:
    """Has copies of the requests answered `1 + runs` times; returns the last copies, and the seconds of each run."""
    seconds = []
    for _ in range(1 + runs):
        copies = [replace(request, answer=[], margins=[]) for request in requests]
        start = time.perf_counter()
        answer(copies)
        seconds.append(time.perf_counter() - start)
    return copies, seconds
