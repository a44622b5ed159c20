"""Benchmarks the host's time of a small layer on uneven rows, forward and backward, where kernels take almost none.

    python -m bench.ragged_host                 # half a minute; prints a table, and writes nothing

The layer is a feed-forward block of width 16: `layer_norm`, `linear`, `gelu`, `linear` and a sum. Its subjects:

*flat tensor*: the entries of all rows, as a plain tensor.
*leanest by hand*: a class with two autograd functions and no check at all. It has no lengths, no second derivatives,
no autocast, and rules for the functions of the layer alone. A class in Python that opens its operands and closes its
results in the autograd graph hardly costs less.
*JaggedTensor*: as it is, and compiled.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import desugar
from bench.int8_sizes import time_fastest
from bench.report import Row, print_rows
from subclasses._torch import DisableTorchFunctionSubclass, make_wrapper_subclass
from subclasses.ragged import JaggedTensor

WIDTH, LENGTHS = 16, (3, 5, 12, 7)


def feed_forward(x: Any, up: Tensor, down: Tensor) -> Any:
    return x + F.linear(F.gelu(F.linear(F.layer_norm(x, (WIDTH,)), up)), down)


# ---- the leanest class by hand -----------------------------------------------------------------------------


class Lean(Tensor):
    """Rows by their entries and offsets; each function has a rule that opens its operands and closes its result."""

    entries: Tensor
    offsets: Tensor

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        rule = _RULES.get(func)
        if rule is not None:
            return rule(func, *args, **(kwargs or {}))
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        first = next(a for a in args if isinstance(a, Lean))
        return wrap(func(*(a.entries if isinstance(a, Lean) else a for a in args)), first.offsets)


def wrap(entries: Tensor, offsets: Tensor) -> Lean:
    size = (len(LENGTHS), max(LENGTHS), *entries.shape[1:])
    x: Any = make_wrapper_subclass(Lean, size, (0, *entries.stride()), dtype=entries.dtype)
    x.entries, x.offsets = entries, offsets
    return x


class Open(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.offsets = x.offsets
        return x.entries.view_as(x.entries)

    @staticmethod
    def backward(ctx, gradient):
        return wrap(gradient, ctx.offsets)


class Close(torch.autograd.Function):
    @staticmethod
    def forward(ctx, entries, offsets):
        return wrap(entries.detach(), offsets)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.entries, None


# The method in C++, which `Function.apply` calls after checks for transforms of torch.func.
open_, close = (super(torch.autograd.Function, function).apply for function in (Open, Close))  # type: ignore[misc]


def _of_one(func: Any, x: Lean, *args: Any, **kwargs: Any) -> Any:
    return close(func(open_(x), *args, **kwargs), x.offsets)


def _of_two(func: Any, x: Lean, y: Lean) -> Any:
    return close(func(open_(x), open_(y)), x.offsets)


_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((F.linear, F.layer_norm, F.gelu), _of_one),
    Tensor.add: _of_two,
}


# ---- steps -------------------------------------------------------------------------------------------------


def make_step(layer: Callable[..., Any], x: Any, weights: list[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """Returns a forward and backward; it returns the gradients by the entries and the weights."""
    leaf, ones = x.detach().requires_grad_(), torch.ones_like(x.detach())
    return lambda: torch.autograd.grad(layer(leaf, *weights), [leaf, *weights], ones)


def make_steps() -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """Returns the steps by name, of equal entries and weights."""
    torch.manual_seed(0)
    rows = [torch.randn(n, WIDTH) for n in LENGTHS]
    jagged, entries = JaggedTensor.from_tensors(rows), torch.cat(rows)
    weights = [torch.randn(4 * WIDTH, WIDTH).requires_grad_(), torch.randn(WIDTH, 4 * WIDTH).requires_grad_()]
    return {
        "flat tensor, eager": make_step(feed_forward, entries, weights),
        "leanest by hand, eager": make_step(feed_forward, wrap(entries, jagged.offsets), weights),
        "JaggedTensor, eager": make_step(feed_forward, jagged, weights),
        "flat tensor, torch.compile": make_step(torch.compile(feed_forward), entries, weights),
        "JaggedTensor, desugar.compile": make_step(desugar.compile(feed_forward), jagged, weights),
    }


def check_equal(steps: dict[str, Callable[[], tuple[Any, ...]]]) -> None:
    """Raises AssertionError if the gradients differ."""
    expected, *others = (
        [g.entries if isinstance(g, Lean) else g.values if isinstance(g, JaggedTensor) else g for g in step()]
        for step in steps.values()
    )
    for gradients in others:
        torch.testing.assert_close(gradients, expected)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="for all turns of one step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = make_steps()
    check_equal(steps)
    timings = time_fastest(steps, options.seconds)
    plain = next(iter(timings.values()))
    print_rows(
        [
            Row(
                "a layer on uneven rows, forward and backward",
                name,
                t,
                {"/ flat tensor, eager": t.median / plain.median},
            )
            for name, t in timings.items()
        ]
    )


if __name__ == "__main__":
    main()
