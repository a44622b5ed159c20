"""A training step of the demo's model: does it wait for the host or for kernels?"""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.gpu.device import Call
from bench.gpu.lines import MICROSECONDS
from bench.gpu.run import Run, Turns

FILLS = (0.25, 0.5, 0.75)
DENSE, JAGGED, NESTED = (
    "dense table, torch.compile",
    "JaggedTensor, desugar.compile",
    "torch.nested, torch.compile",
)
LAUNCHES, KERNEL_SUM, FILL = "kernels", "sum of kernels", "fill"
LONGEST_KERNELS, LONGEST_FUNCTIONS = 10, 15


def uneven_lengths(fill: float, width: int, batch: int) -> list[int]:
    """Returns lengths spread evenly around `fill * width`; the last is `width`."""
    low, high = max(1.0, (2 * fill - 1) * width), min(2 * fill, 1.0) * width
    return [*torch.linspace(low, high, batch).int().tolist()[:-1], width]


@dataclass(frozen=True)
class Scale:
    """The size of the model and of its batch."""

    dim: int = 1024
    heads: int = 16
    layers: int = 4
    width: int = 512
    batch: int = 32
    dtype: torch.dtype = torch.bfloat16


SMALL = Scale(dim=16, heads=2, layers=1, width=12, batch=5, dtype=torch.float32)


# ---------------------------------------------------------------------------------------------------------
# torch.nested
# ---------------------------------------------------------------------------------------------------------


def nested(rows: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns inputs, targets and positions as nested tensors that share their offsets."""
    tokens: Any = torch.nested.nested_tensor([row[:-1] for row in rows], layout=torch.jagged)
    positions = [torch.arange(len(row) - 1, device=row.device) for row in rows]
    targets, positions = (
        torch.nested.nested_tensor_from_jagged(torch.cat(parts), tokens.offsets())
        for parts in ([row[1:] for row in rows], positions)
    )
    return tokens, targets, positions


def nested_loss(model: Any, tokens: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
    """Returns the loss of `LanguageModel` without slicing positions or merging dims, which nested tensors cannot."""
    x = model.embedding(tokens) + model.position(positions)
    for block in model.blocks:
        x = nested_block(block, x)
    return F.cross_entropy(model.head(model.norm(x)).values(), targets.values())


def nested_block(block: Any, x: Tensor) -> Tensor:
    """Computes a `Block`; the attention of nested tensors needs contiguous operands."""
    parts = block.qkv(block.norm1(x)).chunk(3, dim=-1)
    q, k, v = (block.split_heads(part.contiguous()) for part in parts)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + block.out(mixed.transpose(1, 2).flatten(2))
    return x + block.down(F.gelu(block.up(block.norm2(x))))


# ---------------------------------------------------------------------------------------------------------
# subjects
# ---------------------------------------------------------------------------------------------------------


def make_loss(run: Run, name: str, scale: Scale, rows: list[Tensor]) -> tuple[nn.Module, Call]:
    """Returns a model and a function that computes its loss; all subjects have the same weights and rows."""
    import desugar
    from examples._language_model import LanguageModel, dense, jagged

    torch.manual_seed(0)
    model = LanguageModel(scale.dim, scale.heads, scale.layers, scale.width).to(run.device.name, scale.dtype)
    layout, compiler, fn = {
        DENSE: (dense, torch.compile, model),
        JAGGED: (jagged, desugar.compile, model),
        NESTED: (nested, torch.compile, partial(nested_loss, model)),
    }[name]
    loss_of, batch = run.device.compile(compiler, fn), layout(rows)
    return model, lambda: loss_of(*batch)


def _make_update(run: Run, name: str, scale: Scale, rows: list[Tensor]) -> Call:
    model, loss_of = make_loss(run, name, scale, rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True)

    def call() -> None:
        loss_of().backward()
        optimizer.step()
        optimizer.zero_grad()

    return call


def measure_model(run: Run, fills: Sequence[float] | None = None) -> None:
    """Times forward, backward and optimizer step; looks at the kernels and at the host's functions."""
    scale = run.device.pick(Scale(), SMALL)
    for fill in fills or run.device.pick(FILLS[:2], FILLS[1:2]):
        torch.compiler.reset()
        lengths = uneven_lengths(fill, scale.width, scale.batch)
        rows = [torch.randint(256, (n + 1,), device=run.device.name) for n in lengths]
        filled = sum(lengths) / (scale.batch * scale.width)
        group = f"model, training, {filled:.0%} fill"
        makers = {name: partial(_make_update, run, name, scale, rows) for name in (DENSE, JAGGED, NESTED)}
        turns = Turns(
            DENSE, host=True, peak=(DENSE, JAGGED, NESTED), seconds=4.0, after=partial(look_inside, run)
        )
        if run.compare(group, makers, turns):
            run.number(group, DENSE, FILL, filled, "of the table")


def look_inside(run: Run, group: str, name: str, call: Call) -> None:
    """Writes the sum, the number and the longest of a call's kernels, and the host's functions that take longest."""
    kernels = run.device.kernels(call)
    run.number(group, name, KERNEL_SUM, sum(time for _, _, time in kernels), MICROSECONDS)
    run.number(group, name, LAUNCHES, sum(count for _, count, _ in kernels), "a call")
    for kernel, count, time in kernels[:LONGEST_KERNELS]:
        run.line(f"{group}: longest kernels", name, text=f"{time:.0f} µs, {count} times: {kernel[:120]}")
    seen = cProfile.Profile()
    seen.enable()
    for _ in range(3):
        call()
    seen.disable()
    run.device.synchronize()
    stats: Any = pstats.Stats(seen).stats  # type: ignore[attr-defined]
    longest = sorted(stats.items(), key=lambda item: -item[1][2])[:LONGEST_FUNCTIONS]
    for (file, line, function), (_, count, own, _, _) in longest:
        location = f"{'/'.join(file.split('/')[-2:])}:{line} {function}"
        text = f"{1e6 * own / 3:.0f} µs, {count / 3:.0f} times: {location}"
        run.line(f"{group}: the host's functions, under a profiler", name, text=text)
