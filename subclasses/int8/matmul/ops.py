"""Ops for the CPU, which a compiler keeps as one node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import apply_function
from subclasses._torch_tracing import is_compiling_here, is_differentiated

Op = Callable[..., Tensor]


def define_op(schema: str) -> Callable[[Op], Any]:
    """Makes a function an op without derivatives, for tensors on the CPU.

    A call takes a third of the time of an op of `torch.library.custom_op`, which checks for gradients and for results
    that are arguments. These ops need no such checks: functions with derivatives call them, and they allocate their
    results.

    Args:
        schema: The op's name and schema.
    """
    name, _, rest = schema.partition("(")

    def decorate(function: Op) -> Any:
        torch.library.define(name, f"({rest}", tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(name, "cpu")(function)
        space, _, packet = name.partition("::")
        return getattr(getattr(torch.ops, space), packet).default

    return decorate


def register_product(op: Any, result_dtype: Callable[[Tensor], torch.dtype]) -> None:
    """Registers the fake kernel and the vmap rule of ``op(x, matrix, ...)``, a product ``x @ matrix.T``.

    A batch of inputs is one matrix of more rows; the rule multiplies by batched weights one by one.

    Args:
        op: The op.
        result_dtype: Returns the dtype of the result for ``x``.
    """

    def fake(x: Tensor, matrix: Tensor, *rest: Any) -> Tensor:
        return x.new_empty((x.shape[0], matrix.shape[0]), dtype=result_dtype(x))

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        (x, *weight), (dim, *weight_dims) = args, in_dims
        if any(d is not None for d in weight_dims):
            each = (
                [t if d is None else t.select(d, i) for t, d in zip(args, in_dims, strict=True)]
                for i in range(info.batch_size)
            )
            return torch.stack([op(*one) for one in each]), 0
        x = x.movedim(dim, 0)
        return op(x.flatten(0, 1), *weight).unflatten(0, x.shape[:2]), 0

    torch.library.register_fake(op.name(), fake)
    torch.library.register_vmap(op.name(), rule)


def is_traced(x: Tensor) -> bool:
    """Whether ops are being traced to a graph, which a compiler may fuse."""
    return is_compiling_here() or type(x) not in (Tensor, torch.nn.Parameter)


def apply(function: type[torch.autograd.Function], x: Tensor, *args: Any) -> Any:
    """Calls an autograd function of floats and a matrix, or its forward where no derivative can be computed."""
    if is_traced(x) or is_differentiated(x, *args):
        return apply_function(function, x, *args)
    return function.forward(x, *args)
