"""The calls that the kit tries on any value: a table for each kind of call.

A case is a function of one argument. The kit runs it on a value and on the tensors that the value represents. A
case may read sizes and dtype. It makes its other arguments itself, the same ones at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """A call by the name that a report shows.

    Attributes:
        name: the call, as an author would write it.
        run: the call, as a function of its operand.
        marks: facts about the call. ``"works"``: the class takes it in eager mode. ``"shares"``, ``"trains"``: the copy
            shares memory, or requires grad as its value.
        parts: the calls of which it is made: calls that are compiled together, or a result and a write to it.
        operand: its operand, where no setting makes one.
    """

    name: str
    run: Callable[[Any], Any]
    marks: tuple[str, ...] = ()
    parts: tuple[Case, ...] = ()
    operand: Any = None


WHOLE = Case("", lambda x: x)
"""The case of a promise about a class as a whole."""


Table = Mapping[str, Callable[[Any], Any]]

# How cases make plain operands in a block; Dynamo traces the reading.
_OPERANDS: list[Callable[[Tensor], Tensor]] = []


def like(x: Tensor, *shape: int) -> Tensor:
    """A plain tensor of the dtype and device of ``x``, filled with small distinct numbers."""
    ones = torch.ones(shape or x.shape, dtype=torch.int64, device=x.device)
    numbers = ((ones.flatten().cumsum(0) - 1) % 7 - 3).reshape(ones.shape)
    plain = (numbers / 4 if x.dtype.is_floating_point else numbers).to(x.dtype)
    return _OPERANDS[-1](plain) if _OPERANDS and plain.is_floating_point() else plain


@contextmanager
def operands(make: Callable[[Tensor], Tensor]) -> Iterator[list[Tensor]]:
    """Lets a function make the plain operands of cases in a block, and collects them."""
    made: list[Tensor] = []

    def collect(plain: Tensor) -> Tensor:
        made.append(make(plain))
        return made[-1]

    _OPERANDS.append(collect)
    try:
        yield made
    finally:
        _OPERANDS.pop()


def _rows(x: Tensor) -> Tensor:
    """Indices of the last row and of the first row, each twice."""
    return torch.arange(x.shape[0], device=x.device).roll(1)[:2].repeat(2)


# ---- results -------------------------------------------------------------------------------------------------

FUNCTIONAL: dict[str, Callable[[Any], Any]] = {
    "x * 2": lambda x: x * 2,
    "x + x": lambda x: x + x,
    "x - plain": lambda x: x - like(x),
    "plain * x": lambda x: like(x) * x,
    "x * x[:1]": lambda x: x * x[:1],
    "1 - x": lambda x: 1 - x,
    "x / 2": lambda x: x / 2,
    "-x": lambda x: -x,
    "x.abs()": lambda x: x.abs(),
    "x.exp()": lambda x: x.exp(),
    "x.sigmoid()": lambda x: x.sigmoid(),
    "F.relu(x)": lambda x: F.relu(x),
    "F.gelu(x)": lambda x: F.gelu(x),
    "x.clamp(-1, 1)": lambda x: x.clamp(-1, 1),
    "torch.where": lambda x: torch.where(like(x).real > 0, x, x * 2),
    "x == x": lambda x: x == x,
    "x > 0": lambda x: x > 0,
    "x.sum()": lambda x: x.sum(),
    "x.sum(-1)": lambda x: x.sum(-1),
    "x.mean(0)": lambda x: x.mean(0),
    "x.amax(-1)": lambda x: x.amax(-1),
    "x.var(-1)": lambda x: x.var(-1),
    "x.norm()": lambda x: x.norm(),
    "x.softmax(-1)": lambda x: x.softmax(-1),
    "x.log_softmax(-1)": lambda x: x.log_softmax(-1),
    "x.cumsum(-1)": lambda x: x.cumsum(-1),
    "x.sort(-1)": lambda x: x.sort(-1).values,
    "x.argmax(-1)": lambda x: x.argmax(-1),
    "x @ x.mT": lambda x: x @ x.mT,
    "plain @ x": lambda x: like(x, 3, x.shape[-2]) @ x,
    "F.linear(plain, x)": lambda x: F.linear(like(x, 3, x.shape[1]), x),
    "F.linear(plain, x, bias)": lambda x: F.linear(like(x, 3, x.shape[1]), x, like(x, x.shape[0])),
    "F.linear(x, plain, bias)": lambda x: F.linear(x, like(x, 3, x.shape[-1]), like(x, 3)),
    "F.layer_norm(x)": lambda x: F.layer_norm(x, (x.shape[-1],)),
    "F.embedding(i, x)": lambda x: F.embedding(_rows(x), x),
    "F.embedding(i, x, padding_idx=0)": lambda x: F.embedding(_rows(x), x, 0),
    "nn.Embedding": lambda x: F.embedding(_rows(x), x, None, None, 2.0, False, False),
    "torch.cat([x, x])": lambda x: torch.cat([x, x]),
    "torch.stack([x, x])": lambda x: torch.stack([x, x]),
    "x.flip(0)": lambda x: x.flip(0),
    "x.masked_fill": lambda x: x.masked_fill(torch.arange(x.shape[-1], device=x.device) % 2 == 0, 0),
    "x.index_select": lambda x: x.index_select(0, _rows(x)),
    "x.repeat(2, 1)": lambda x: x.repeat(2, 1),
    "x * x": lambda x: x * x,
    "x * plain": lambda x: x * like(x),
    "x + 3": lambda x: x + 3,
    "x.sum(-1, keepdim=True)": lambda x: x.sum(-1, keepdim=True),
    "x.clone()": lambda x: x.clone(),
    "x.contiguous()": lambda x: x.contiguous(),
    "torch.zeros_like(x)": lambda x: torch.zeros_like(x),
    "torch.ones_like(x)": lambda x: torch.ones_like(x),
    "torch.full_like(x, 2)": lambda x: torch.full_like(x, 2),
    "x.new_zeros(2)": lambda x: x.new_zeros(2),
    "x @ vector": lambda x: x @ like(x, x.shape[-1]),
    "vector @ x": lambda x: like(x, x.shape[-2]) @ x,
    "torch.mv(x, vector)": lambda x: torch.mv(x, like(x, x.shape[-1])),
    "F.linear(vector, x)": lambda x: F.linear(like(x, x.shape[-1]), x),
}


def _converted(x: Any, y: Any) -> list[Any]:
    """The dtype of a result, and its numbers in the dtype of ``x``.

    A class may round before it converts, or after.
    """
    return [y.dtype, y.to(x.dtype)]


# Calls with arguments that a rule may drop: not the default, or of another sign, order or row than in other cases.
ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "x * -2": lambda x: x * -2,
    "plain - x": lambda x: like(x) - x,
    "x[-1]": lambda x: x[-1],
    "torch.add(x, x, alpha=2)": lambda x: torch.add(x, x, alpha=2),
    "torch.add(x, plain, alpha=2)": lambda x: torch.add(x, like(x), alpha=2),
    "torch.add(plain, x, alpha=2)": lambda x: torch.add(like(x), x, alpha=2),
    "torch.add(x, 1, alpha=2)": lambda x: torch.add(x, 1, alpha=2),
    "torch.sub(x, x, alpha=2)": lambda x: torch.sub(x, x, alpha=2),
    "torch.sub(x, plain, alpha=2)": lambda x: torch.sub(x, like(x), alpha=2),
    "torch.sub(plain, x, alpha=2)": lambda x: torch.sub(like(x), x, alpha=2),
    "torch.rsub(x, 1, alpha=2)": lambda x: torch.rsub(x, 1, alpha=2),
    'torch.div(x, 0.3, rounding_mode="floor")': lambda x: torch.div(x, 0.3, rounding_mode="floor"),
    'torch.div(x, 0.3, rounding_mode="trunc")': lambda x: torch.div(x, 0.3, rounding_mode="trunc"),
    'torch.div(x, plain, rounding_mode="floor")': lambda x: torch.div(x, like(x) + 2, rounding_mode="floor"),
    "torch.cat([x, x], -1)": lambda x: torch.cat([x, x], -1),
    "torch.stack([x, x], -1)": lambda x: torch.stack([x, x], -1),
    "x.index_select(-1, i)": lambda x: x.index_select(-1, _rows(x)),
    "x.roll(1, -1)": lambda x: x.roll(1, -1),
    "x.cumsum(-2)": lambda x: x.cumsum(-2),
    "x.softmax(-2)": lambda x: x.softmax(-2),
    "x.sum(-2)": lambda x: x.sum(-2),
    "x.mean((-2, -1))": lambda x: x.mean((-2, -1)),
    "x.amax(-2)": lambda x: x.amax(-2),
    "aten.split(x, 2, -1)": lambda x: torch.ops.aten.split.Tensor(x, 2, -1),
    "torch.chunk(x, 2, -1)": lambda x: list(torch.chunk(x, 2, -1)),
    "x.repeat_interleave(2, -1)": lambda x: x.repeat_interleave(2, -1),
    "x.double() * 2": lambda x: _converted(x, x.double() * 2),
    "x.softmax(0)": lambda x: x.softmax(0),
    "x.flip(-1)": lambda x: x.flip(-1),
    "x.tril(1)": lambda x: x.tril(1),
    "x.index_select(1, i)": lambda x: x.index_select(1, _rows(x)),
    "x.masked_fill(mask, 3)": lambda x: x.masked_fill(torch.arange(x.shape[-1], device=x.device) % 2 == 0, 3),
    "x.prod(-1, dtype=torch.float64)": lambda x: _converted(x, x.prod(-1, dtype=torch.float64)),
    "F.leaky_relu(x, 0.5)": lambda x: F.leaky_relu(x, 0.5),
    "x.clamp(min=0)": lambda x: x.clamp(min=0),
    "x.clamp(max=0)": lambda x: x.clamp(max=0),
    'F.gelu(x, approximate="tanh")': lambda x: F.gelu(x, approximate="tanh"),
    "x.sum(0, keepdim=True)": lambda x: x.sum(0, keepdim=True),
    "x.sum(dim=(), keepdim=True)": lambda x: x.sum(dim=(), keepdim=True),
    "x.sum(dtype=torch.float64)": lambda x: _converted(x, x.sum(dtype=torch.float64)),
    "x.sum(-1, dtype=torch.float64)": lambda x: _converted(x, x.sum(-1, dtype=torch.float64)),
    "x.mean(-1, keepdim=True)": lambda x: x.mean(-1, keepdim=True),
    "x.mean(dtype=torch.float64)": lambda x: _converted(x, x.mean(dtype=torch.float64)),
    "x.mean(-1, dtype=torch.float64)": lambda x: _converted(x, x.mean(-1, dtype=torch.float64)),
    "x.amax(-1, keepdim=True)": lambda x: x.amax(-1, keepdim=True),
    "x.amin(0, keepdim=True)": lambda x: x.amin(0, keepdim=True),
    "x.max(-1, keepdim=True)": lambda x: [*x.max(-1, keepdim=True)],
    "x.var(-1, correction=0)": lambda x: x.var(-1, correction=0),
    "x.var(-1, keepdim=True)": lambda x: x.var(-1, keepdim=True),
    "x.std(-1, correction=0)": lambda x: x.std(-1, correction=0),
    "x.norm(1, -1, keepdim=True)": lambda x: x.norm(1, -1, keepdim=True),
    "x.logsumexp(-1, keepdim=True)": lambda x: x.logsumexp(-1, keepdim=True),
    "x.prod(-1, keepdim=True)": lambda x: x.prod(-1, keepdim=True),
    "x.any(-1, keepdim=True)": lambda x: x.any(-1, keepdim=True),
    "x.all(-1, keepdim=True)": lambda x: x.all(-1, keepdim=True),
    "x.argmax(-1, keepdim=True)": lambda x: x.argmax(-1, keepdim=True),
    "x.softmax(-1, dtype=torch.float64)": lambda x: _converted(x, x.softmax(-1, dtype=torch.float64)),
    "x.log_softmax(-1, dtype=torch.float64)": lambda x: _converted(x, x.log_softmax(-1, dtype=torch.float64)),
    "x.cumsum(-1, dtype=torch.float64)": lambda x: _converted(x, x.cumsum(-1, dtype=torch.float64)),
    "x.sort(-1, descending=True)": lambda x: x.sort(-1, descending=True).values,
    "x.round(decimals=1)": lambda x: x.round(decimals=1),
    "torch.nan_to_num(x / 0, nan=3)": lambda x: torch.nan_to_num((x - x) / 0, nan=3.0),
    "torch.addmm(plain, plain, x, beta=2, alpha=3)": lambda x: torch.addmm(
        like(x, 3, x.shape[1]), like(x, 3, x.shape[0]), x, beta=2, alpha=3
    ),
    "torch.addcmul(x, x, plain, value=2)": lambda x: torch.addcmul(x, x, like(x), value=2),
    "torch.zeros_like(x, dtype=torch.float64)": lambda x: _converted(
        x, torch.zeros_like(x, dtype=torch.float64)
    ),
    "x.clone().add_(plain, alpha=2)": lambda x: x.clone().add_(like(x), alpha=2),
    "x.clone().sub_(plain, alpha=2)": lambda x: x.clone().sub_(like(x), alpha=2),
    'x.clone().div_(0.3, rounding_mode="floor")': lambda x: x.clone().div_(0.3, rounding_mode="floor"),
}

CLONE = Case("x.clone()", FUNCTIONAL["x.clone()"])

# ---- views -------------------------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[Any], Any]] = {
    "x.detach()": lambda x: x.detach(),
    "x.view(-1)": lambda x: x.view(-1),
    "x.view(x.shape)": lambda x: x.view(x.shape),
    "x.transpose(0, -1)": lambda x: x.transpose(0, -1),
    "x.t()": lambda x: x.t(),
    "x[:1]": lambda x: x[:1],
    "x[0]": lambda x: x[0],
    "x[1:]": lambda x: x[1:],
    "x[::2]": lambda x: x[::2],
    "x[..., ::2]": lambda x: x[..., ::2],
    "x[..., 1:]": lambda x: x[..., 1:],
    "x[:, 0]": lambda x: x[:, 0],
    "x.select(-1, 0)": lambda x: x.select(-1, 0),
    "x[:, 1:]": lambda x: x[:, 1:],
    "x.narrow(-1, 0, 1)": lambda x: x.narrow(-1, 0, 1),
    "x.transpose(-2, -1)": lambda x: x.transpose(-2, -1),
    "x.unsqueeze(0)": lambda x: x.unsqueeze(0),
    "x.unsqueeze(1)": lambda x: x.unsqueeze(1),
    "x.unsqueeze(-1)": lambda x: x.unsqueeze(-1),
    "x.unflatten(-1, (1, -1))": lambda x: x.unflatten(-1, (1, -1)),
    "x.movedim(-1, 0)": lambda x: x.movedim(-1, 0),
    "x.expand": lambda x: x.expand(2, *x.shape),
    "x.split(1)": lambda x: x.split(1)[0],
    "x.unbind()": lambda x: x.unbind()[0],
    "x.unbind(-1)": lambda x: x.unbind(-1)[-1],
    "x.flatten()": lambda x: x.flatten(),
    "x.as_strided": lambda x: x.as_strided(x.shape, x.stride()),
}

# ---- mutations ----------------------------------------------------------------------------------------------

MUTATIONS: dict[str, Callable[[Any], Any]] = {
    "x.add_(1)": lambda x: x.add_(1),
    "x.mul_(2)": lambda x: x.mul_(2),
    "x.mul_(plain)": lambda x: x.mul_(like(x)),
    "x.zero_()": lambda x: x.zero_(),
    "x.fill_(2)": lambda x: x.fill_(2),
    "x.copy_(plain)": lambda x: x.copy_(like(x)),
    "x.copy_(x * 2)": lambda x: x.copy_(x * 2),
    "torch.mul(x, 2, out=x)": lambda x: torch.mul(x, 2, out=x),
}

METADATA_MUTATIONS: dict[str, Callable[[Any], Any]] = {
    "x.t_()": lambda x: x.t_(),
    "x.unsqueeze_(0)": lambda x: x.unsqueeze_(0),
    "x.squeeze_()": lambda x: x.squeeze_(),
}

# Writes to a result: each may reach other inner tensors than the others do.
WRITES: dict[str, Callable[[Any], Any]] = {
    "y.mul_(2)": lambda y: y.mul_(2),
    "y.add_(1)": lambda y: y.add_(1),
    "y.zero_()": lambda y: y.zero_(),
    "y.fill_(2)": lambda y: y.fill_(2),
    "y.copy_(y.flip(0))": lambda y: y.copy_(y.flip(0)),
}

# ---- pairs, random numbers, lazy bits ------------------------------------------------------------------------

# Calls of a pair of values, or of the two tensors that they represent.
PAIRS: dict[str, Callable[[Any], Any]] = {
    "x + y": lambda pair: pair[0] + pair[1],
    "x - y": lambda pair: pair[0] - pair[1],
    "x * y": lambda pair: pair[0] * pair[1],
    "x < y": lambda pair: pair[0] < pair[1],
    "torch.maximum(x, y)": lambda pair: torch.maximum(*pair),
    "torch.cat([x, y])": lambda pair: torch.cat(pair),
    "torch.stack([x, y])": lambda pair: torch.stack(pair),
    "torch.where(x > 0, x, y)": lambda pair: torch.where(pair[0] > 0, *pair),
    "x.clone().copy_(y)": lambda pair: pair[0].clone().copy_(pair[1]),
    "x.clone().add_(y)": lambda pair: pair[0].clone().add_(pair[1]),
}

# More of them, tried where the values differ in numbers alone.
MORE_PAIRS: dict[str, Callable[[Any], Any]] = {
    "x / y": lambda pair: pair[0] / pair[1],
    "x == y": lambda pair: pair[0] == pair[1],
    "torch.minimum(x, y)": lambda pair: torch.minimum(*pair),
    "torch.where(mask, x, y)": lambda pair: torch.where(like(pair[0]).real > 0, *pair),
    "torch.cat([x, y], -1)": lambda pair: torch.cat(pair, -1),
    "torch.stack([x, y], -1)": lambda pair: torch.stack(pair, -1),
    "torch.add(x, y, alpha=2)": lambda pair: torch.add(*pair, alpha=2),
    "torch.sub(x, y, alpha=2)": lambda pair: torch.sub(*pair, alpha=2),
    "torch.lerp(x, y, 0.25)": lambda pair: torch.lerp(pair[0], pair[1], 0.25),
    "torch.addcmul(x, x, y)": lambda pair: torch.addcmul(pair[0], *pair),
    "torch.addcmul(x, y, y)": lambda pair: torch.addcmul(pair[0], pair[1], pair[1]),
    "x @ y": lambda pair: pair[0] @ pair[1],
    "x @ y.mT": lambda pair: pair[0] @ pair[1].mT,
    "F.linear(x, y)": lambda pair: F.linear(*pair),
    "x.clone().mul_(y)": lambda pair: pair[0].clone().mul_(pair[1]),
    "x[:1] - y": lambda pair: pair[0][:1] - pair[1],
}

RANDOM: dict[str, Callable[[Any], Any]] = {
    "F.dropout(x)": lambda x: F.dropout(x, 0.5),
    "torch.rand_like(x)": lambda x: torch.rand_like(x),
    "torch.randn_like(x)": lambda x: torch.randn_like(x),
    "x.clone().uniform_()": lambda x: x.clone().uniform_(),
    "torch.bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
}

LAZY: dict[str, Callable[[Any], Any]] = {
    "x.conj()": lambda x: x.conj(),
    "x.conj().clone()": lambda x: x.conj().clone(),
    "x.conj() * x": lambda x: x.conj() * x,
    "x.conj().resolve_conj()": lambda x: x.conj().resolve_conj(),
    "x.conj().conj() + 1": lambda x: x.conj().conj() + 1,
    "x.conj().imag": lambda x: x.conj().imag,
    "x.conj().real": lambda x: x.conj().real,
    "x.mH": lambda x: x.mH,
    "x.conj().sum()": lambda x: x.conj().sum(),
}

# Calls on each entry of one value. The result keeps the label of each row, such as a time.
POINTWISE = {
    *(
        "x * 2",
        "x + x",
        "x - plain",
        "plain * x",
        "1 - x",
        "x / 2",
        "-x",
        "x.abs()",
        "x.exp()",
        "x.sigmoid()",
    ),
    *("F.relu(x)", "F.gelu(x)", "x.clamp(-1, 1)", "x * x", "x + 3"),
}
