"""Benchmarks calls of modules with many layers: the guards on submodules and parameters at each call.

*396 parameters*: 36 layers, compiled by a backend whose graphs return at once, so that only guards and the dispatch to
them are timed. *12 layers, int8 weights*: the same for weights that are wrappers; and with Inductor, at a width of 64
and batches of 1, 4 and 8. *The graph*: the graph that Inductor compiled for `desugar.compile`, called with its
tensors. It has the kernels of both columns, so its share of a call bounds their ratio. Without gradients. A figure is
the median of the fastest tenth of the turns (see `int8_sizes`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

import desugar
from subclasses.int8 import Int8WeightOnlyConfig, quantize_

Call = Callable[[], Any]
BATCH = 4

# ---------------------------------------------------------------------------------------------------------
# subjects
# ---------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer with eleven parameters, and a float attribute that `forward` reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.mix = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)
        self.act, self.scale = nn.GELU(), 0.5

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        x = x + self.mix(self.query(h) * self.scale + self.key(h) + self.value(h))
        return x + self.down(self.act(self.up(self.between(x))))


def make_deep(layers: int = 36, width: int = 4) -> nn.Module:
    """Makes a sequence of layers."""
    return nn.Sequential(*(Layer(width) for _ in range(layers)))


def make_int8(layers: int = 12, width: int = 64) -> nn.Module:
    """Makes linear layers whose weights wrap int8 values and scales, each followed by an activation."""
    model = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())))
    quantize_(model, Int8WeightOnlyConfig())
    return model


def return_at_once(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., tuple[Any, ...]]:
    """A backend that computes nothing: its graphs return the first input with the size of a batch."""
    index = next(n for n, x in enumerate(inputs) if isinstance(x, Tensor) and x.shape[:1] == (BATCH,))
    return lambda *args: (args[index],)


WAYS: dict[str, Callable[..., Any]] = {
    "torch.compile": lambda model, backend: torch.compile(model, backend=backend),
    "desugar.compile": lambda model, backend: desugar.compile(model, backend=backend),
}
CHECKS = "what is asked"  # ends the names of rows that time the checks of a call: their graph returns at once
SUBJECTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int], Any]] = {
    f"396 parameters, {CHECKS}": (lambda: make_deep(width=8), (BATCH, 8), return_at_once),
    f"12 layers, int8 weights, {CHECKS}": (make_int8, (BATCH, 64), return_at_once),
    "12 layers, int8 weights, with Inductor, batch 1": (make_int8, (1, 64), "inductor"),
    "12 layers, int8 weights, with Inductor, batch 4": (make_int8, (4, 64), "inductor"),
    "12 layers, int8 weights, with Inductor, batch 8": (make_int8, (8, 64), "inductor"),
}
GRAPH = "the graph"


def make_calls(name: str) -> dict[str, Call]:
    """Returns compiled calls of one module, by way."""
    make, size, backend = SUBJECTS[name]
    x, calls = torch.randn(size), {}
    for way, compile_ in WAYS.items():
        compiled = compile_(make(), backend)
        with torch.no_grad():
            for _ in range(4):
                compiled(x)
        calls[way] = _without_grad(compiled, x)
        if backend == "inductor" and way == "desugar.compile":
            calls[GRAPH] = _graph_alone(compiled, x)
    return calls


def _graph_alone(compiled: Any, x: Tensor) -> Call:
    """Returns a call of the compiled graph with the tensors that a call of the module passes to it."""
    (program,) = compiled.programs
    scope = program.run.__globals__
    graph, items = scope["compiled_graph"], []
    scope["compiled_graph"] = lambda given: (items.extend(given), graph(given))[1]
    with torch.no_grad():
        compiled(x)
    scope["compiled_graph"] = graph
    return lambda: graph([*items])


def _without_grad(compiled: Callable[..., Any], x: Tensor) -> Call:
    def call() -> None:
        with torch.no_grad():
            compiled(x)

    return call
