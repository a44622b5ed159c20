"""Benchmarks training steps on rows of uneven length on a GPU: a feed-forward layer, and the demo's model.

Dense padding costs the same at every fill. Computing on existing entries only should cost the dense time times the
fill. The goal allows 15 % more for costs that do not depend on the fill.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import desugar
from bench.gpu_timing import Call, synced
from bench.report import Row
from bench.subjects import copy_function
from bench.timing import Timing, time_side_by_side
from examples._language_model import Block, LanguageModel, dense, jagged
from subclasses.ragged import JaggedTensor

FILLS = (0.25, 0.5, 0.75)
DENSE, JAGGED, NESTED = (
    "dense table, torch.compile",
    "JaggedTensor, desugar.compile",
    "torch.nested, torch.compile",
)
LIMIT = "limit: dense * fill * 1.15"


def uneven_lengths(fill: float, width: int, batch: int) -> list[int]:
    """Returns lengths spread evenly around `fill * width`; the last is `width`."""
    low, high = max(1.0, (2 * fill - 1) * width), min(2 * fill, 1.0) * width
    return [*torch.linspace(low, high, batch).int().tolist()[:-1], width]


def _add_call(calls: dict[str, Call], name: str, make: Callable[[], Call]) -> None:
    """Makes a call and runs it once; skips `torch.nested` where the device or compiler does not support it."""
    try:
        call = make()
        call()
    except (RuntimeError, NameError) as error:
        if name != NESTED:
            raise
        print(f"no figure for {name}: {str(error).partition(chr(10))[0]}", file=sys.stderr)
    else:
        calls[name] = call


def _rows_at(fill: float, group: str, calls: dict[str, Call], rounds: int) -> list[Row]:
    """Times calls, with ratios to dense padding and to dense padding times the fill."""
    timings = time_side_by_side({name: synced(call) for name, call in calls.items()}, rounds=rounds)
    baseline = timings[DENSE]
    timings[LIMIT] = Timing(
        *(figure * fill * 1.15 for figure in (baseline.median, baseline.low, baseline.high))
    )
    return [
        Row(
            f"{group}, {fill:.0%} fill",
            name,
            t,
            {
                f"/ {DENSE}": t.median / baseline.median,
                "/ (dense * fill)": t.median / (baseline.median * fill),
            },
            ours="desugar" in name,
        )
        for name, t in timings.items()
    ]


# ---------------------------------------------------------------------------------------------------------
# a feed-forward layer
# ---------------------------------------------------------------------------------------------------------


def feed_forward(x: Any, up: Tensor, down: Tensor) -> Any:
    return x + F.linear(F.gelu(F.linear(F.layer_norm(x, (x.shape[-1],)), up)), down)


def measure_rows(
    rounds: int,
    width: int = 512,
    dim: int = 1024,
    batch: int = 32,
    device: str = "cuda",
    fills: Sequence[float] | None = None,
) -> list[Row]:
    """Times one training step of a feed-forward layer."""
    rows = []
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    up, down = torch.randn(4 * dim, dim, **options) / 32, torch.randn(dim, 4 * dim, **options) / 64
    for fill in fills or FILLS:
        torch.compiler.reset()
        lengths = uneven_lengths(fill, width, batch)
        parts = [torch.randn(n, dim, **options) for n in lengths]
        kinds: dict[str, tuple[Any, Callable]] = {
            DENSE: (nn.utils.rnn.pad_sequence(parts, batch_first=True), torch.compile),
            JAGGED: (JaggedTensor.from_tensors(parts), desugar.compile),
            NESTED: (torch.nested.nested_tensor(parts, layout=torch.jagged), torch.compile),
        }
        calls: dict[str, Call] = {}
        for name, (x, compile) in kinds.items():
            fn = compile(copy_function(feed_forward))
            _add_call(calls, name, partial(_make_step, fn, x, up, down))
        rows += _rows_at(sum(lengths) / (batch * width), "training", calls, rounds)
    return rows


def _make_step(fn: Callable, x: Any, up: Tensor, down: Tensor) -> Call:
    leaf, weights = x.detach().requires_grad_(), [w.detach().requires_grad_() for w in (up, down)]
    with torch.no_grad():
        like = fn(leaf, *weights).detach()
    return lambda: torch.autograd.grad(fn(leaf, *weights), [leaf, *weights], like)


# ---------------------------------------------------------------------------------------------------------
# the demo's model
# ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """The size of the model and of its batch."""

    dim: int = 1024
    heads: int = 16
    layers: int = 4
    width: int = 512
    batch: int = 32
    dtype: torch.dtype = torch.bfloat16

    def make_model(self, kind: type[LanguageModel] = LanguageModel) -> LanguageModel:
        return kind(self.dim, self.heads, self.layers, self.width)


class NestedBlock(Block):
    """The block for `torch.nested`, whose attention needs contiguous operands."""

    def split_heads(self, x: Tensor) -> Tensor:
        return super().split_heads(x.contiguous())


class NestedModel(LanguageModel):
    """The model for `torch.nested`, which can neither slice positions nor merge the batch and ragged dims."""

    def __init__(self, dim: int, heads: int, layers: int, longest: int):
        super().__init__(dim, heads, layers, longest)
        self.blocks = nn.Sequential(*(NestedBlock(dim, heads) for _ in range(layers)))

    def forward(self, tokens: Tensor, targets: Tensor, places: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = self.embedding(tokens) + self.position(places)
        return F.cross_entropy(self.head(self.norm(self.blocks(x))).values(), targets.values())


def nested(rows: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns inputs, targets and positions as nested tensors that share their offsets."""
    tokens: Any = torch.nested.nested_tensor([row[:-1] for row in rows], layout=torch.jagged)
    places = [torch.arange(len(row) - 1, device=row.device) for row in rows]
    targets, places = (
        torch.nested.nested_tensor_from_jagged(torch.cat(parts), tokens.offsets())
        for parts in ([row[1:] for row in rows], places)
    )
    return tokens, targets, places


Layout = Callable[[list[Tensor]], tuple[Tensor, ...]]
WAYS: dict[str, tuple[type[LanguageModel], Layout, Callable]] = {
    DENSE: (LanguageModel, dense, torch.compile),
    JAGGED: (LanguageModel, jagged, desugar.compile),
    NESTED: (NestedModel, nested, torch.compile),
}


def make_losses(scale: Scale, lengths: Sequence[int], device: str) -> dict[str, tuple[nn.Module, Call]]:
    """Returns a model and a function that computes its loss, by name; all have the same weights and rows."""
    model = scale.make_model()
    rows = [torch.randint(256, (n + 1,), device=device) for n in lengths]
    losses: dict[str, tuple[nn.Module, Call]] = {}
    for name, (kind, layout, compile) in WAYS.items():
        own = scale.make_model(kind)
        own.load_state_dict(copy.deepcopy(model.state_dict()))
        fn, batch = compile(own.to(device, scale.dtype)), layout(rows)
        losses[name] = own, lambda f=fn, b=batch: f(*b)
    return losses


def measure_model(
    rounds: int, scale: Scale | None = None, device: str = "cuda", fills: Sequence[float] | None = None
) -> list[Row]:
    """Times forward, backward and optimizer step of the demo's model, at a larger size."""
    scale, rows = scale or Scale(), []
    for fill in fills or FILLS:
        torch.compiler.reset()
        lengths = uneven_lengths(fill, scale.width, scale.batch)
        calls: dict[str, Call] = {}
        for name, (model, loss_of) in make_losses(scale, lengths, device).items():
            _add_call(calls, name, partial(_make_update, model, loss_of))
        rows += _rows_at(sum(lengths) / (scale.batch * scale.width), "model, training", calls, rounds)
    return rows


def _make_update(model: nn.Module, loss_of: Call) -> Call:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True)

    def call() -> None:
        loss_of().backward()
        optimizer.step()
        optimizer.zero_grad()

    return call
