"""The ops of the matrix: each is a function of two values of one class, of which it may use one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

_WEIGHT = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4)
_BIAS = torch.linspace(-1, 1, 5, dtype=torch.float64)
_ROW = torch.linspace(1, 2, 4, dtype=torch.float64)
_MASK = torch.tensor([[True, False, True, True]] * 3)
_INDEX = torch.tensor([2, 0])


@dataclass(frozen=True)
class Op:
    """One op.

    Attributes:
        name: As it is written.
        run: Takes two values, or two plain tensors in their place.
        kind: "pointwise", "pointwise of two", "reduction", "view", "copy", "product", "pointwise write" or "write".
    """

    name: str
    run: Callable[[Any, Any], Any]
    kind: str


def _written(write: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Writes to a copy of the first operand, and returns it, so that a leaf may be an operand."""

    def run(x: Any, y: Any) -> Any:
        target = x.clone()
        write(target, y)
        return target

    return run


def _set_row(x: Any, y: Any) -> None:
    x[1] = y[0]


_POINTWISE = {
    "-x": lambda x, y: -x,
    "x * 2": lambda x, y: x * 2,
    "2 - x": lambda x, y: 2 - x,
    "x / 3": lambda x, y: x / 3,
    "x ** 2": lambda x, y: x**2,
    "x * row": lambda x, y: x * _ROW,
    "exp": lambda x, y: x.exp(),
    "log": lambda x, y: x.log(),
    "sqrt": lambda x, y: x.sqrt(),
    "sin": lambda x, y: torch.sin(x),
    "abs": lambda x, y: x.abs(),
    "sigmoid": lambda x, y: x.sigmoid(),
    "tanh": lambda x, y: x.tanh(),
    "relu": lambda x, y: F.relu(x - 1),
    "gelu": lambda x, y: F.gelu(x),
    "silu": lambda x, y: F.silu(x),
    "softplus": lambda x, y: F.softplus(x),
    "clamp": lambda x, y: x.clamp(0.7, 1.2),
    "where": lambda x, y: torch.where(x > 1, x, x * 3),
    "to float32": lambda x, y: x.to(torch.float32),
    "clone": lambda x, y: x.clone(),
    "dropout of 0": lambda x, y: F.dropout(x, 0.0),
}
_OF_TWO = {
    "x + y": lambda x, y: x + y,
    "x - y": lambda x, y: torch.sub(x, y, alpha=2),
    "x * y": lambda x, y: x * y,
    "x * x": lambda x, y: x * x,
    "x / y": lambda x, y: x / y,
    "x ** y": lambda x, y: x**y,
    "maximum": lambda x, y: torch.maximum(x, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
}
_REDUCTIONS = {
    "sum": lambda x, y: x.sum(),
    "sum(1)": lambda x, y: x.sum(1),
    "mean(0, keepdim)": lambda x, y: x.mean(0, keepdim=True),
    "amax(1)": lambda x, y: x.amax(1),
    "var(1)": lambda x, y: x.var(1),
    "norm": lambda x, y: torch.linalg.vector_norm(x, dim=-1),
    "logsumexp": lambda x, y: x.logsumexp(-1),
    "softmax": lambda x, y: x.softmax(-1),
    "log_softmax": lambda x, y: F.log_softmax(x, 1),
    "cumsum": lambda x, y: x.cumsum(0),
    "prod(1)": lambda x, y: x.prod(1),
    "layer_norm": lambda x, y: F.layer_norm(x, (4,), _ROW, None),
    "mse_loss": lambda x, y: F.mse_loss(x, y),
    "max(1)": lambda x, y: x.max(1).values,
}
_VIEWS = {
    "x[0]": lambda x, y: x[0],
    "x[1:]": lambda x, y: x[1:],
    "x[..., ::2]": lambda x, y: x[..., ::2],
    "view": lambda x, y: x.view(2, 6),
    "reshape": lambda x, y: x.reshape(2, 6),
    "transpose": lambda x, y: x.mT,
    "permute": lambda x, y: x.permute(1, 0),
    "unsqueeze": lambda x, y: x.unsqueeze(0),
    "squeeze": lambda x, y: x[:1].squeeze(0),
    "flatten": lambda x, y: x.flatten(),
    "narrow": lambda x, y: x.narrow(1, 1, 2),
    "diagonal": lambda x, y: x.diagonal(),
    "chunk": lambda x, y: x.chunk(2, 1),
    "split": lambda x, y: x.split([1, 2])[1],
    "unbind": lambda x, y: x.unbind(0)[2],
    "unflatten": lambda x, y: x.unflatten(1, (2, 2)),
}
_COPIES = {
    "expand": lambda x, y: x.expand(2, 3, 4) * 1,
    "cat": lambda x, y: torch.cat([x, y]),
    "cat along 1": lambda x, y: torch.cat([x, y, x], 1),
    "stack": lambda x, y: torch.stack([x, y], 1),
    "x[index]": lambda x, y: x[_INDEX],
    "index_select": lambda x, y: x.index_select(1, _INDEX),
    "masked_fill": lambda x, y: x.masked_fill(_MASK, 3.0),
    "flip": lambda x, y: x.flip(1),
    "roll": lambda x, y: x.roll(1, 0),
    "repeat": lambda x, y: x.repeat(2, 1),
    "repeat_interleave": lambda x, y: x.repeat_interleave(2, 0),
    "contiguous": lambda x, y: x.mT.contiguous(),
    "pad": lambda x, y: F.pad(x, (1, 1)),
    "tril": lambda x, y: x.tril(),
    "sort": lambda x, y: x.sort(1).values,
    "topk": lambda x, y: x.topk(2, 1).values,
}
_PRODUCTS = {
    "x @ plain": lambda x, y: x @ _WEIGHT.mT,
    "x @ y.mT": lambda x, y: x @ y.mT,
    "linear": lambda x, y: F.linear(x, _WEIGHT, _BIAS),
    "linear by x": lambda x, y: F.linear(_WEIGHT, x),
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, _WEIGHT),
    "bmm": lambda x, y: torch.bmm(x.unsqueeze(0), _WEIGHT.mT.unsqueeze(0)),
    "addmm": lambda x, y: torch.addmm(_BIAS, x, _WEIGHT.mT),
    "outer": lambda x, y: torch.outer(x[0], _ROW),
    "conv1d": lambda x, y: F.conv1d(x.unsqueeze(1), _ROW[:2].reshape(1, 1, 2)),
    "cosine_similarity": lambda x, y: F.cosine_similarity(x, y, 1),
}
_WRITES = {
    "add_": _written(lambda x, y: x.add_(y, alpha=3)),
    "mul_": _written(lambda x, y: x.mul_(2)),
    "sigmoid_": _written(lambda x, y: x.sigmoid_()),
    "zero_": _written(lambda x, y: x.zero_()),
    "copy_": _written(lambda x, y: x.copy_(y)),
    "clamp_": _written(lambda x, y: x.clamp_(max=1)),
}
_WRITES_TO_PARTS = {
    "x[1] = y[0]": _written(_set_row),
    "x[:, 1:3].mul_": _written(lambda x, y: x[:, 1:3].mul_(2)),
    "masked_fill_": _written(lambda x, y: x.masked_fill_(_MASK, 3.0)),
}

OPS = [
    Op(name, run, kind)
    for kind, table in {
        "pointwise": _POINTWISE,
        "pointwise of two": _OF_TWO,
        "reduction": _REDUCTIONS,
        "view": _VIEWS,
        "copy": _COPIES,
        "product": _PRODUCTS,
        "pointwise write": _WRITES,
        "write": _WRITES_TO_PARTS,
    }.items()
    for name, run in table.items()
]
