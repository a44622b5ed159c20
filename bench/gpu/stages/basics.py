"""Measures the basics: versions, kernels for rows of any lengths, launches, replays, a backward."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu.device import KERNELS_A_GRAPH, Call
from bench.gpu.run import Run, Turns
from bench.gpu.stages.attention import VARLEN, attend_flat
from bench.timing import describe_machine

KERNELS = "attention over rows of any lengths"
VERSIONS, LAUNCHES, REPLAYS, ENGINE = "versions", "a launch", "a replay", "a backward of one node"
PACKAGES = ("torch", "triton", "torchao", "gemlite", "optree", "numpy", "transformers")


def measure_basics(run: Run) -> None:
    _say_versions(run)
    _try_varlen(run)
    small = torch.zeros(8, device=run.device.name)
    square = torch.zeros(16, 16, device=run.device.name)
    out = torch.empty_like(square)

    def by_inductor() -> Callable[[Tensor], Tensor]:
        return run.device.compile(torch.compile, lambda x: x.mul_(1.0), dynamic=False)

    makers: dict[str, Callable[[], Call]] = {
        "ATen: x.add_(0)": lambda: lambda: small.add_(0),
        "cuBLAS: torch.mm(x, x, out=y)": lambda: lambda: torch.mm(square, square, out=out),
        "Inductor: a compiled x.mul_(1), guards included": lambda: _bind(by_inductor(), small),
    }
    turns = Turns("ATen: x.add_(0)", host=True, seconds=1.0)
    run.compare(LAUNCHES, makers, turns)
    empty = f"a graph of {KERNELS_A_GRAPH} small kernels"
    replays: dict[str, Callable[[], Call]] = {
        "a graph of one small kernel": lambda: run.device.record([lambda: small.add_(0)]),
        empty: lambda: run.device.record([lambda: small.add_(0)] * KERNELS_A_GRAPH),
    }
    run.compare(REPLAYS, replays, Turns("a graph of one small kernel", host=True, seconds=1.0))
    backwards: dict[str, Callable[[], Call]] = {
        "on the CPU: in the caller's thread": lambda: _one_node("cpu"),
        "on the device: in the engine's thread": lambda: _one_node(run.device.name),
    }
    run.compare(ENGINE, backwards, Turns("on the CPU: in the caller's thread", host=True, seconds=1.0))


def _bind(fn: Callable[[Tensor], Tensor], x: Tensor) -> Call:
    return lambda: fn(x)


def _say_versions(run: Run) -> None:
    facts: dict[str, Any] = {"python": platform.python_version(), "cores": os.cpu_count()}
    facts["cpu"] = describe_machine()["cpu"]
    for name in PACKAGES:
        facts[name] = "not installed"
        with suppress(importlib.metadata.PackageNotFoundError):
            facts[name] = importlib.metadata.version(name)
    facts["CUDA"] = str(torch.version.cuda)
    if torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name()
        facts["cuDNN"] = str(torch.backends.cudnn.version())
        facts["flash attention"] = str(torch.backends.cuda.is_flash_attention_available())
        facts["capability"] = str(torch.cuda.get_device_capability())
    for name, fact in facts.items():
        run.line(VERSIONS, name, text=str(fact))
    run.attempt(VERSIONS, "subclasses and desugar", run.library)


def _try_varlen(run: Run) -> None:
    """Says which kernels for rows of any lengths there are, by calling each once."""
    q = torch.randn(24, 2, 64, device=run.device.name, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 8, 24], dtype=torch.int32, device=run.device.name)
    for name in VARLEN:
        if run.attempt(KERNELS, name, partial(attend_flat, name, q, q, q, offsets, 16)) is not None:
            run.line(KERNELS, name, text="works")


def _one_node(device: str) -> Call:
    x = torch.ones((), device=device, requires_grad=True)
    gradient = torch.ones((), device=device)

    def call() -> None:
        _Pass.apply(x).backward(gradient)
        x.grad = None

    return call


class _Pass(torch.autograd.Function):
    """Computes nothing, so that its time is the engine's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient
