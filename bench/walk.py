"""Counts which of our modules a call enters, and how often it moves between them: `python -m bench.walk`.

The first training call of a `desugar.compile` function compiles it; the second call runs the compiled code. A profiler
function records the module of each Python function that is called. A move is a call from one of our modules to another.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import desugar
from subclasses import TensorSubclass, inner

PACKAGES = ("desugar.", "subclasses.")


class Pair(TensorSubclass, fallback="map"):
    """A pair of tensors; every op runs on each."""

    first: Tensor = inner()
    second: Tensor = inner()


@dataclass(slots=True)
class Walk:
    """The modules that a call enters; a profiler function.

    Attributes:
        entries: Module -> the number of entries from another module.
        order: The modules in the order of their first entry.
        last: The module entered last.
    """

    entries: Counter[str] = field(default_factory=Counter)
    order: list[str] = field(default_factory=list)
    last: str = ""

    @property
    def moves(self) -> int:
        """The number of moves from one module to another."""
        return sum(self.entries.values())

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Records one event of the profiler."""
        name = frame.f_globals.get("__name__", "")
        if event != "call" or not name.startswith(PACKAGES) or name == self.last:
            return
        if name not in self.entries:
            self.order.append(name)
        self.entries[name] += 1
        self.last = name


def loss(x: Any, w: Tensor) -> Any:
    """Computes a loss from a subclass and a parameter."""
    return (x * w).sin().sum()


def walk_calls() -> tuple[Walk, Walk]:
    """Returns the walks of the first and the second training call, forward and backward."""
    compiled = desugar.compile(loss, backend="eager")
    leaf, ones = torch.randn(3, requires_grad=True), (torch.ones(()), torch.ones(()))
    y = loss(Pair(leaf, torch.randn(3)), torch.randn(3, requires_grad=True))
    y.backward(y.cotangent(*ones))  # resolves the ops of the class, and of its cotangents
    warm_up = desugar.compile(lambda x, w: (x + w).cos().sum(), backend="eager")
    walks = Walk(), Walk()
    for function, walk in ((warm_up, None), (compiled, walks[0]), (compiled, walks[1])):
        x, w = Pair(torch.randn(3), torch.randn(3)), torch.randn(3, requires_grad=True)
        gradient = y.detach().cotangent(*ones)
        collects = gc.isenabled()
        gc.disable()  # a collection of older objects is not a part of the call
        sys.setprofile(walk)
        try:
            y = function(x, w)
            torch.autograd.backward(y, gradient)
        finally:
            sys.setprofile(None)
            if collects:
                gc.enable()
    return walks


def main() -> None:
    """Prints both walks."""
    for title, walk in zip(("first call", "second call"), walk_calls(), strict=True):
        print(f"{title}: {len(walk.order)} modules, {walk.moves} moves")
        for name in walk.order:
            print(f"    {walk.entries[name]:4d}  {name}")


if __name__ == "__main__":
    main()
