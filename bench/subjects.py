"""What is measured: one function on tensors of three kinds, run in four ways, with and without a backward.

The function doubles each of its arguments; it does as good as nothing, so what remains is what a wrapped
argument costs. A *kind* is what an argument is: two plain tensors (the floor: what a wrapped pair holds), PyTorch's
own hand-written `TwoTensor`, or the same pair declared with `TensorSubclass`. A *way* is what runs the function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import desugar
from subclasses import TensorSubclass, inner

SHAPE = (8, 8)  # small: the kernels cost nothing beside the wrappers
COUNTS = (1, 5, 20, 50)


class Pair(TensorSubclass, fallback="map"):
    """`TwoTensor`, declared."""

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


def copy_function(fn: FunctionType) -> FunctionType:
    """The same function with a code object of its own: Dynamo keeps its compiled frames per code object."""
    return FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__)


# ---------------------------------------------------------------------------------------------------------
# subjects
# ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """One thing to time; `build()` gives the call."""

    mode: str
    count: int
    kind: str
    way: str
    device: str = "cpu"

    def build(self) -> Callable[[], Any]:
        """Compiles, where there is something to compile, and returns what is to be timed, already warm."""
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
