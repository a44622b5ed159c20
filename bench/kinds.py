"""Measures the cost of a wrapped argument for the library's classes: int8 weights, padded and jagged rows.

As in `subjects.py`, tensors are small, so that the time of a call is not the time of its kernels. Each family has these
kinds:

- *plain*: the same computation on the inner tensors of the others; this is the limit.
- A hand-written class, where there is one.
- The declared class.
- A peer, if it is installed; desugaring leaves it to PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.exc import InductorError

from bench.layouts import torchao_weights
from bench.subjects import WAYS, copy_function, double
from examples.int8_weight import Int8ByHand, quantizer
from subclasses.int8 import Int8Tensor
from subclasses.ragged import JaggedTensor, PaddedTensor

Call = Callable[[], Any]
SIZE, LENGTHS = 16, (3, 1, 4)
PEERS = ("torch.nested", "torchao")


@dataclass(frozen=True)
class Kind:
    """A kind of argument.

    Attributes:
        fn: The function of the arguments.
        make: Makes one wrapped argument, or its plain tensors.
        make_first: Makes the leading arguments. If there are any, gradients are computed for them only.
    """

    fn: Callable[..., list[Any]]
    make: Callable[[], tuple[Any, ...]]
    make_first: Callable[[], tuple[Any, ...]] = tuple


# ---------------------------------------------------------------------------------------------------------
# int8
# ---------------------------------------------------------------------------------------------------------


def multiply_all(x: Tensor, *weights: Tensor) -> list[Tensor]:
    return [F.linear(x, w) for w in weights]


def multiply_parts(x: Tensor, *parts: Tensor) -> list[Tensor]:
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [F.linear(x, qdata.to(x.dtype)) * scale.squeeze(-1) for qdata, scale in pairs]


def _weight() -> Tensor:
    return torch.randn(SIZE, SIZE)


def _input() -> tuple[Tensor]:
    return (torch.randn(4, SIZE),)


def _parts() -> tuple[Tensor, Tensor]:
    w: Any = quantizer(Int8ByHand)(_weight())
    return w.qdata, w.scale


# ---------------------------------------------------------------------------------------------------------
# rows
# ---------------------------------------------------------------------------------------------------------


class PaddedByHand(Tensor):
    """A padded batch and the lengths of its rows, with only the methods that a pointwise op of one argument needs."""

    padded: Tensor
    lengths: Tensor

    @staticmethod
    def __new__(cls, padded: Tensor, lengths: Tensor) -> PaddedByHand:
        self = Tensor._make_wrapper_subclass(cls, padded.shape, padded.stride(), dtype=padded.dtype)
        self.padded, self.lengths = padded, lengths
        return self

    def __repr__(self, *, tensor_contents=None):
        return f"PaddedByHand({self.padded}, {self.lengths})"

    def __tensor_flatten__(self):
        return ["padded", "lengths"], None

    @classmethod
    def __tensor_unflatten__(cls, inner_tensors, context, outer_size, outer_stride):
        return cls(inner_tensors["padded"], inner_tensors["lengths"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = [x.padded if type(x) is cls else x for x in args]
        lengths = next(x.lengths for x in args if type(x) is cls)
        return cls(func(*plain, **(kwargs or {})), lengths)


def _rows() -> list[Tensor]:
    return [torch.randn(n, SIZE) for n in LENGTHS]


def _padded() -> Any:
    return PaddedTensor.from_tensors(_rows())


# ---------------------------------------------------------------------------------------------------------
# families
# ---------------------------------------------------------------------------------------------------------

FAMILIES: dict[str, dict[str, Kind]] = {
    "Int8": {
        "plain": Kind(multiply_parts, _parts, _input),
        "by hand": Kind(multiply_all, lambda: (Int8ByHand(*_parts()),), _input),
        "Int8Tensor": Kind(multiply_all, lambda: (Int8Tensor(*_parts()),), _input),
        "torchao": Kind(multiply_all, lambda: (torchao_weights(_weight())["torchao"],), _input),
    },
    "Padded": {
        "plain": Kind(double, lambda: (_padded().padded,)),
        "by hand": Kind(double, lambda: (PaddedByHand((x := _padded()).padded, x.lengths),)),
        "PaddedTensor": Kind(double, lambda: (_padded(),)),
    },
    "Jagged": {
        "plain": Kind(double, lambda: (torch.cat(_rows()),)),
        "JaggedTensor": Kind(double, lambda: (JaggedTensor.from_tensors(_rows()),)),
        "torch.nested": Kind(double, lambda: (torch.nested.nested_tensor(_rows(), layout=torch.jagged),)),
    },
}


def make_calls(family: str, mode: str, count: int) -> dict[tuple[str, str], Call]:
    """Returns compiled, warm calls by (kind, way); skips a peer that is not installed or whose kernel fails."""
    calls: dict[tuple[str, str], Call] = {}
    for name, kind in FAMILIES[family].items():
        if name == "torchao" and not torchao_weights(_weight()):
            continue
        for way in WAYS:
            if name in PEERS and "desugar" in way:
                continue
            try:
                calls[name, way] = make_call(kind, way, mode, count)
            except (NameError, InductorError) as error:
                if name not in PEERS:
                    raise
                print(f"no figure for {name}, {way}: {error}", file=sys.stderr)
    return calls


def make_call(kind: Kind, way: str, mode: str, count: int) -> Call:
    """Returns a warm call of the function on `count` arguments, in training with its backward."""
    first = kind.make_first()
    args = [*first, *(x for _ in range(count) for x in kind.make())]
    fn = WAYS[way](copy_function(kind.fn))  # type: ignore[arg-type]
    with torch.no_grad():
        tangents = [y.detach() for y in kind.fn(*args)]

    def infer() -> Any:
        with torch.no_grad():
            return fn(*args)

    def train() -> Any:
        return torch.autograd.grad(fn(*args), leaves, tangents)

    call = infer if mode == "inference" else train
    leaves = [x.requires_grad_() for x in first or args] if call is train else []
    for _ in range(3):
        call()
    return call
