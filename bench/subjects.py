"""The subjects of the main benchmark: one function on three kinds of tensors, run in four ways and two modes.

The function doubles each of its arguments. It takes almost no time, so the rest is the cost of a wrapped argument.
A *kind* is the type of an argument: two plain tensors (the inner tensors of a pair, as the limit), PyTorch's own
hand-written `TwoTensor`, or the same pair declared with `TensorSubclass`. A *way* is the compiler. A *mode* is
inference or training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import desugar
from bench.timing import copy_function
from subclasses import TensorSubclass, inner

SHAPE = (8, 8)  # small: the time of kernels is negligible
COUNTS = (1, 5, 20, 50)


class Pair(TensorSubclass, fallback="map"):
    """`TwoTensor` as a declared class."""

    a: Tensor = inner()
    b: Tensor = inner()


# ---------------------------------------------------------------------------------------------------------
# kinds, ways, modes
# ---------------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {
    "plain": lambda a, b: (a, b),
    "TwoTensor": lambda a, b: (TwoTensor(a, b),),
    "declared": lambda a, b: (Pair(a, b),),
}
WAYS: dict[str, Callable[[Callable], Callable]] = {
    "eager": lambda fn: fn,
    "torch.compile": lambda fn: torch.compile(fn, fullgraph=True),
    'torch.compile(backend="desugar")': lambda fn: torch.compile(fn, fullgraph=True, backend="desugar"),
    "desugar.compile": desugar.compile,
}
MODES = ("inference", "training")


def double(*args: Tensor) -> list[Tensor]:
    return [x * 2 for x in args]


# ---------------------------------------------------------------------------------------------------------
# subjects
# ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """One call to time: a mode, a number of arguments, a kind and a way."""

    mode: str
    count: int
    kind: str
    way: str
    device: str = "cpu"

    def build(self) -> Callable[[], Any]:
        """Compiles the function, calls it three times, and returns the call."""
        fn = WAYS[self.way](copy_function(double))
        call = self._infer(fn) if self.mode == "inference" else self._train(fn)
        for _ in range(3):
            call()
        return call

    def _make_args(self) -> list[Tensor]:
        pairs = [[torch.rand(SHAPE, device=self.device) for _ in "ab"] for _ in range(self.count)]
        return [x for pair in pairs for x in KINDS[self.kind](*pair)]

    def _infer(self, fn: Callable) -> Callable[[], Any]:
        args = self._make_args()

        def call() -> list[Tensor]:
            with torch.no_grad():
                return fn(*args)

        return call

    def _train(self, fn: Callable) -> Callable[[], Any]:
        args, tangents = [x.requires_grad_() for x in self._make_args()], self._make_args()
        return lambda: torch.autograd.grad(fn(*args), args, tangents)


SUBJECTS = [
    Subject(mode, count, kind, way) for mode in MODES for count in COUNTS for kind in KINDS for way in WAYS
]
