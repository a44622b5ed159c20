"""The subject of the explanations: a small int8 layer with a rule, a materializing op and a backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subclasses import TensorSubclass, inner, static


class Int8Weight(TensorSubclass, dtype_from="scale", fallback="materialize"):
    qdata: Tensor = inner(dtype=torch.int8)
    scale: Tensor = inner()
    axis: int = static(default=0)

    def materialize(self) -> Tensor:
        return self.qdata.to(self.scale.dtype) * self.scale


@Int8Weight.implements(F.linear)
def rule_for_linear(func, x, w, bias=None):
    qdata, scale = w.unwrap()
    y = func(x, qdata.to(x.dtype)) * scale.squeeze(-1)
    return y if bias is None else y + bias


def layer(x, w):
    y = F.linear(x, w).relu()
    z = w * 2  # materializes
    return y + z.sum()


def layer_inputs():
    return make_x(), make_weight()


def make_x(rows=2):
    return torch.linspace(-1, 1, rows * 8).reshape(rows, 8).requires_grad_()


def make_weight(axis=0):
    return Int8Weight(
        torch.arange(-16, 16, dtype=torch.int8).reshape(4, 8), torch.full((4, 1), 0.5), axis=axis
    )


def effects(x, y):
    x.add_(1)
    return x[0], y, x * 2


def twice(x):
    return x * 2


def no_inputs():
    return torch.ones(3) * 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x, *, scale=2):
        return self.inner(x) * scale
