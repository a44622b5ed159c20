"""The models that the cases cut and shard, and the declared classes that they distribute."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.classes import float8, mxfp8, nf4, nvfp4
from subclasses import TensorSubclass, inner
from tests.subclasses.subjects import LowRank


class Pair(TensorSubclass, fallback="map"):
    """Two tensors of one size; each op runs on both."""

    first: Tensor = inner()
    second: Tensor = inner()


class Scaled(TensorSubclass, fallback="materialize", trainable=True):
    """A matrix whose rows are scaled; both are trained."""

    matrix: Tensor = inner()
    scale: Tensor = inner()

    def materialize(self) -> Tensor:
        return self.matrix * self.scale


class MLP(nn.Module):
    """Two layers."""

    def __init__(self, width: int = 8, inside: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inside), nn.Linear(inside, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Block(nn.Module):
    """Attention of heads of four, with a residual."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(heads.transpose(1, 2).flatten(2))


class Adapted(nn.Module):
    """A frozen layer with a trained adapter of rank two."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.left = nn.Parameter(torch.randn(linear.in_features, 2) / 4)
        self.right = nn.Parameter(torch.randn(2, linear.out_features) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x @ self.left @ self.right


class PairLinear(nn.Module):
    """A layer whose weight is a pair: the sum of two products."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(Pair(torch.randn(out, width) / 4, torch.randn(out, width) / 4))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.weight.unwrap()
        return F.linear(x, first) + F.linear(x, second) * 2


class WrapperLinear(nn.Module):
    """A layer whose weight is of a class that materializes."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def of_pairs() -> nn.Module:
    return nn.Sequential(PairLinear(8, 16), nn.Tanh(), PairLinear(16, 4))


def of_scaled() -> nn.Module:
    """The weights scale their rows."""

    def layer(width: int, out: int) -> nn.Module:
        return WrapperLinear(Scaled(torch.randn(out, width), torch.rand(out, 1) + 1))

    return nn.Sequential(layer(8, 16), nn.Tanh(), layer(16, 4))


def of_low_rank() -> nn.Module:
    """The weights have a factor that stays whole on each rank."""

    def layer(width: int, out: int) -> nn.Module:
        return WrapperLinear(LowRank(torch.randn(out, 3), torch.randn(3, width) / 2))

    return nn.Sequential(layer(8, 16), nn.Tanh(), layer(16, 4))


FORMATS = {
    "float8": float8.Float8.from_float,
    "MXFP8": mxfp8.MXFP8.from_float,
    "NVFP4": nvfp4.NVFP4.from_float,
    "NF4": partial(nf4.NF4.from_float, block=16, group=8),  # two rows of scales have one factor
}


def of_format(name: str) -> nn.Module:
    """Frozen weights of a format of the gallery, with trained adapters."""

    def layer(width: int, out: int) -> nn.Module:
        linear = nn.Linear(width, out)
        linear.weight = nn.Parameter(FORMATS[name](linear.weight.detach()), requires_grad=False)
        return Adapted(linear)

    return nn.Sequential(layer(64, 32), nn.Tanh(), layer(32, 64))
