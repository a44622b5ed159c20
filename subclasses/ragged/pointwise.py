"""Pointwise ops: the same op on the entries.

They run below autograd on ``values``, so that each is one node in the autograd graph as for plain tensors. Two things
must be settled above it, since a cotangent comes back as the result is: operands whose rows lie elsewhere, and a dense
operand with a value for each entry.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subclasses.aliases import tagged_functions
from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.rows import (
    entries_of,
    first_ragged,
    is_entrywise,
    matched_values,
    relaid,
    same_rows,
    spread,
)

aten = torch.ops.aten

# ---- below autograd --------------------------------------------------------------------------------------------

# Pointwise all the same, and without the tag.
UNTAGGED = (
    aten._prelu_kernel,
    aten._prelu_kernel_backward,
    aten.elu_backward,
    aten.fill.Scalar,
    aten.fill.Tensor,
    aten.floor_divide,
    aten.hardshrink_backward,
    aten.hardsigmoid_backward,
    aten.hardswish,
    aten.hardswish_backward,
    aten.hardtanh_backward,
    aten.leaky_relu_backward,
    aten.log_sigmoid_backward,
    aten.log_sigmoid_forward,
    aten.rrelu_with_noise_backward,
    aten.rsub.Scalar,
    aten.rsub.Tensor,
    aten.softplus_backward,
    aten.softshrink_backward,
)


@JaggedTensor.implements(torch.Tag.pointwise, *UNTAGGED)
def run_pointwise(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The op on values; what stands beside is brought to the entries."""
    x = first_ragged((*args, *kwargs.values()))
    result = op(*(_operand(op, x, a) for a in args), **{k: _operand(op, x, a) for k, a in kwargs.items()})
    if isinstance(result, tuple):
        return tuple(x.with_values(part) for part in result)
    return x.with_values(result)


def _operand(op: Any, x: JaggedTensor, a: Any) -> Any:
    if a is x:
        return x.values
    if isinstance(a, JaggedTensor):
        return matched_values(op, x, a)
    return spread(op, x, a) if isinstance(a, Tensor) else a


# ---- above autograd --------------------------------------------------------------------------------------------


# `max` and `min` of two tensors are pointwise, as is `rrelu`, and `equal` has the tag; their rules stand elsewhere.
ELSEWHERE = ("equal", "max", "min", "rrelu")
FUNCTIONS = [f for f in tagged_functions(torch.Tag.pointwise) if f.__name__ not in ELSEWHERE]
FUNCTIONS = list(dict.fromkeys([*FUNCTIONS, torch.floor_divide, torch.Tensor.floor_divide]))


@JaggedTensor.implements(*FUNCTIONS)
def align_operands(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Brings operands to the rows of the first ragged one, where autograd sees it; then the op as if without a rule."""
    if len(args) + len(kwargs) == 1:
        return JaggedTensor.unruled(func, *args, **kwargs)
    x = first_ragged((*args, *kwargs.values()))
    args = tuple(_aligned(func, x, a, i) for i, a in enumerate(args))
    return JaggedTensor.unruled(func, *args, **{k: _aligned(func, x, a) for k, a in kwargs.items()})


def _aligned(func: Any, x: JaggedTensor, a: Any, place: int = 1) -> Any:
    if a is x or not isinstance(a, Tensor):
        return a
    if isinstance(a, JaggedTensor):
        lie_alike = (x.lengths is None and a.lengths is None) or same_rows(x, a)
        return a if lie_alike and a.max_length == x.max_length else relaid(func, x, a)
    if place == 0 and func.__name__.endswith("_"):
        return a  # written to, and refused further down
    return entries_of(x, a) if a.requires_grad and is_entrywise(x, a) else a
