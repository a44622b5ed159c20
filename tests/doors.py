"""The ways to call a function, none of which compiles kernels: eager mode, `torch.compile`, and both of this project.

Each takes the options of `torch.compile`. `DOORS` has all of them by name, `COMPILED` all but eager mode.
"""

from __future__ import annotations

from typing import Any

import torch

import desugar


def eager(fn: Any, **options: Any) -> Any:
    """The judge."""
    return fn


def by_stock(fn: Any, **options: Any) -> Any:
    """PyTorch without this library."""
    return torch.compile(fn, backend="aot_eager", **options)


def by_desugar(fn: Any, **options: Any) -> Any:
    """`desugar.compile`, with graphs that run as they are."""
    return desugar.compile(fn, backend="eager", **options)


def by_torch(fn: Any, **options: Any) -> Any:
    """The pass as a backend of `torch.compile`, its graphs run as they are."""
    return torch.compile(fn, backend="desugar", options={"backend": "eager"}, **options)


DOORS = {"eager": eager, "stock": by_stock, "desugar": by_desugar, "inside": by_torch}
COMPILED = {name: door for name, door in DOORS.items() if door is not eager}
