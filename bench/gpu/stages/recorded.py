"""A whole training step as one CUDA graph: does it give the loss that the step gives without it?"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from bench.gpu.device import Call
from bench.gpu.run import Run, Turns
from bench.gpu.stages.training import CLASSES, Layer

PLAIN, RECORDED = "desugar.compile", "desugar.record"
BATCHES = 3


def measure_recorded(run: Run) -> None:
    """Compares the losses of three batches of one budget, then times a step with its optimizer."""
    import desugar

    tokens, dim, heads = run.device.pick((32768, 2048, 16), (64, 16, 2))
    batches = [_pack(run, seed, tokens, dim) for seed in range(BATCHES)]
    group = f"a whole step, {dim} wide, a budget of {tokens:,} tokens"
    makers = {PLAIN: partial(_make_step, run, dim, heads, batches, lambda step: step)}
    makers[RECORDED] = partial(_make_step, run, dim, heads, batches, desugar.record)
    losses = {
        name: run.attempt(group, f"{name}, losses", partial(_losses, make)) for name, make in makers.items()
    }
    if losses[PLAIN] is not None and losses[RECORDED] is not None:
        off = (losses[PLAIN] - losses[RECORDED]).abs().max().item()
        run.number(group, RECORDED, f"largest difference of {BATCHES} losses", off, "")
    run.compare(group, makers, Turns(PLAIN, host=True))


def _pack(run: Run, seed: int, tokens: int, dim: int) -> tuple[Any, Any]:
    """Returns rows that leave a tail of the budget, and their classes."""
    from subclasses.ragged import JaggedTensor

    torch.manual_seed(seed)
    longest = max(2, tokens // 8)
    lengths = [longest, *torch.randint(1, longest, (6,)).tolist()]
    device, dtype = run.device.name, run.device.pick(torch.bfloat16, torch.float32)
    rows = [torch.randn(n, dim, device=device, dtype=dtype) for n in lengths]
    answers = [torch.randint(CLASSES, (n,), device=device) for n in lengths]
    pack = partial(JaggedTensor.pack, tokens=tokens, rows=16, longest=longest)
    return pack(rows), pack(answers)


def _make_step(run: Run, dim: int, heads: int, batches: list[tuple[Any, Any]], wrap: Any) -> Call:
    import desugar

    torch.manual_seed(0)
    dtype = run.device.pick(torch.bfloat16, torch.float32)
    layer = Layer(dim, heads).to(run.device.name, dtype)
    loss_of = run.device.compile(desugar.compile, layer)
    options = {"capturable": True} if run.device.name == "cuda" else {}
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-4, **options)

    def step(x: Any, targets: Any) -> Any:
        loss = loss_of(x, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    wrapped, number = wrap(step), 0

    def call() -> Any:
        nonlocal number
        number += 1
        return wrapped(*batches[number % len(batches)])

    return call


def _losses(make: Any) -> Any:
    call = make()
    return torch.stack([call().clone().float() for _ in range(2 * BATCHES)])
