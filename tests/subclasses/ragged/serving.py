"""A small decoder, its decoding loop over padded tensors, and a mode in which nothing may be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from subclasses.ragged import PaddedTensor

# ---- nothing is read -------------------------------------------------------------------------------------------


class NoReading(TorchDispatchMode):
    """Refuses every op that hands data to the host."""

    REFUSED = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Any other op runs."""
        if func.overloadpacket.__name__.split(".")[-1] in self.REFUSED:
            raise AssertionError(f"{func} reads data")
        return func(*args, **(kwargs or {}))


# ---- a decoder -------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """A small decoder, as one would write it for a dense batch."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(20, 8), torch.nn.Embedding(64, 8)
        self.norm, self.qkv, self.head = torch.nn.LayerNorm(8), torch.nn.Linear(8, 24), torch.nn.Linear(8, 20)

    def forward(self, tokens):
        """Logits for each token."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(x)


def decode_step(model: Callable[[Any], Any], tokens: PaddedTensor) -> PaddedTensor:
    """Every row longer by its most likely next token."""
    return tokens.append(model(tokens)[:, -1].argmax(-1))


def decode(
    step: Callable[[PaddedTensor], PaddedTensor], prompts: list[Tensor], longest: int, bucket: int
) -> Iterator[PaddedTensor]:
    """Steps until the longest row has this many tokens; the host counts, since it may not ask."""
    tokens = PaddedTensor.from_tensors(prompts, multiple=bucket)
    for length in range(max(map(len, prompts)), longest):
        tokens = step(tokens.to_padded(multiple=bucket, at_least=length + 1))
        yield tokens


def decode_row(model: Callable[[Any], Any], prompt: Tensor, steps: int) -> Tensor:
    """The same for one plain row."""
    for _ in range(steps):
        prompt = torch.cat([prompt, model(prompt[None])[0, -1:].argmax(-1)])
    return prompt
