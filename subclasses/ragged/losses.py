"""Losses: the mean or sum over the entries that exist."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.families import implement_losses
from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.rows import first_ragged, relaid, shown, values_beside

# ---- cross entropy ---------------------------------------------------------------------------------------------


@JaggedTensor.implements(F.cross_entropy)
def _(  # noqa: PLR0913
    func: Any,
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if size_average is not None or reduce is not None:
        raise DispatchError(f"{func.__name__}: size_average and reduce are deprecated; use reduction")
    if not isinstance(input, JaggedTensor):
        raise DispatchError(
            f"{func.__name__}: expected ragged logits beside {shown(target)}, got {shown(input)}"
        )
    logits, classes = _class_dim_second(func, input)
    given = _target_entries(func, input, target, ignore_index)
    loss = func(
        logits,
        given,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction if input.lengths is None or not given.is_floating_point() else "none",
        label_smoothing=label_smoothing,
    )
    if reduction == "none":
        return input.with_entries(loss, input.ragged_dim - (classes < input.ragged_dim))
    if loss.dim() == 0:
        return loss
    total = input.segments.keep(loss).sum()
    return total if reduction == "sum" else total / input.segments.number()


def _class_dim_second(func: Any, x: JaggedTensor) -> tuple[Tensor, int]:
    """The logits ``[total, C, ...]``, and the outer dimension of the classes."""
    classes = 1
    if x.dim() < 2 or classes == x.ragged_dim:
        raise DispatchError(
            f"{func.__name__}: expected logits [N, C] of merged dimensions or [B, C, T], got {shown(x)}; write "
            f"x.flatten(0, 1), or x.transpose(1, 2)"
        )
    return x.entries(), classes


def _target_entries(func: Any, x: JaggedTensor, target: Any, ignore_index: int) -> Tensor:
    """The targets of the entries; those of entries that do not exist are ignored."""
    if isinstance(target, JaggedTensor):
        if target.ragged_dim != (
            x.ragged_dim if target.is_floating_point() or not x.ragged_dim else x.ragged_dim - 1
        ):
            raise DispatchError(
                f"{func.__name__}: {shown(x)} and the target {shown(target)} do not fit together"
            )
        target = _beside(func, x, target)
        if target.is_floating_point():
            return target.entries()
        return target.segments.keep(target.leading(target.values), ignore_index)
    if x.ragged_dim:
        raise DispatchError(f"{func.__name__}: expected a ragged target for {shown(x)}, got {shown(target)}")
    return target if target.is_floating_point() else x.segments.keep(target, ignore_index)


def _beside(func: Any, x: JaggedTensor, target: JaggedTensor) -> JaggedTensor:
    """The target with its entries where those of the logits are."""
    likeness = x.with_entries(x.leading(x.values), target.ragged_dim)
    if target.dim() != x.dim():
        likeness = likeness.with_values(torch.empty_like(target.values), target.ragged_dim)
    return relaid(func, likeness, target)


# ---- losses of two operands ------------------------------------------------------------------------------------


def batch_size(x: JaggedTensor) -> Any:
    """The extent of the first dimension: the rows, or the entries of merged ones."""
    return x.offsets.shape[0] - 1 if x.ragged_dim else x.segments.number()


def _beside_values(func: Any, x: JaggedTensor, a: Any) -> Any:
    """As `values_beside`, with ones in holes, which are in the domain of every loss."""
    beside = values_beside(func, x, a)
    return x.kept(beside, 1) if isinstance(a, JaggedTensor) else beside


implement_losses(JaggedTensor, first_ragged, _beside_values, lambda x, loss: x.with_values(loss), batch_size)
