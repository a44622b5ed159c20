"""Gradients at holes are 0: an entry of ``values`` that belongs to no row does not exist.

Backward formulas multiply the value in a hole by a zero cotangent, and ``0 * inf`` is NaN. Therefore this module sets
the gradient of ``values`` to 0 at holes, once for every op.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subclasses._torch import apply_function
from subclasses.ragged.segments import Segments


def without_gradient_at_holes(
    values: Tensor, offsets: Tensor, lengths: Tensor | None, count: Tensor | None, ragged_dim: int
) -> Tensor:
    """Returns the same values, whose gradient is 0 where no row has an entry."""
    if (lengths is None and count is None) or not (torch.is_grad_enabled() and values.requires_grad):
        return values
    values_dim = max(ragged_dim - 1, 0)
    # A mask needs no width. It is computed here, above autograd, where a trace has the offsets.
    exists = Segments(offsets, lengths, values.size(values_dim), 0, count).exists
    return apply_function(ExistingEntries, values, exists, values_dim)


class ExistingEntries(torch.autograd.Function):
    """An alias of the values; the backward keeps the gradient of existing entries."""

    @staticmethod
    def forward(values: Tensor, exists: Tensor, values_dim: int) -> Tensor:
        """Returns an alias that shares the version counter, as ``Construct`` does."""
        return values.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Saves the mask of existing entries."""
        values, exists, values_dim = inputs
        ctx.save_for_backward(exists.view(-1, *(1 for _ in range(values.dim() - values_dim - 1))))

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        """Returns the cotangent of existing entries, and 0 at holes."""
        (cotangent,) = cotangents
        (exists,) = ctx.saved_tensors
        return torch.where(exists, cotangent, 0), None, None
