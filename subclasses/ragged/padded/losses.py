"""Losses: the mean or sum over the entries that exist."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.families import implement_losses
from subclasses.ragged.padded.rows import check_rows_match, first_padded, shown, table_beside
from subclasses.ragged.padded.tensor import PaddedTensor

# ---- cross entropy ---------------------------------------------------------------------------------------------


@PaddedTensor.implements(F.cross_entropy)
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
    if isinstance(input, PaddedTensor) and input.merged:
        return _of_merged(func, input, target, weight, ignore_index, reduction, label_smoothing)
    _check_targets(func, input, target)
    options = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    of_classes = target.is_floating_point()
    # Indices that do not exist are ignored, and PyTorch counts the others; probabilities are counted here.
    per_entry = reduction == "none" or of_classes
    loss = func(
        input.to_dense(),
        target.to_dense(0 if of_classes else ignore_index),
        reduction="none" if per_entry else reduction,
        **options,
    )
    if not per_entry:
        return loss
    rows = input.with_padded(loss, input.ragged_dim - 1, 0)
    loss = rows.like_dense(loss)
    return {"none": lambda: loss, "sum": loss.sum, "mean": loss.mean}[reduction]()


def _of_merged(func: Any, input: PaddedTensor, target: Any, *options: Any) -> Any:
    """The loss of ``[N, C, ...]``, the classes behind merged dimensions: of the rows, the classes before them."""
    target = target if isinstance(target, PaddedTensor) else input.like_dense(target)
    if (input.ragged_dim, target.ragged_dim, target.merged) != (0, 0, True):
        raise DispatchError(
            f"{func.__name__}: expected merged logits [N, C] and a target [N] merged alike, got {shown(input)} and "
            f"{shown(target)}"
        )
    weight, ignore_index, reduction, label_smoothing = options
    rows = target.unmerged()
    loss = func(
        input.unmerged().transpose(1, 2),
        rows.transpose(1, 2) if target.is_floating_point() else rows,
        weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return loss.merge() if reduction == "none" else loss


def _check_targets(func: Any, x: Any, target: Any) -> None:
    if not isinstance(x, PaddedTensor) or not isinstance(target, PaddedTensor):
        raise DispatchError(
            f"{func.__name__}: expected padded logits and a padded target, got {shown(x)} and {shown(target)}"
        )
    shift = 0 if target.is_floating_point() else 1
    if (
        (x.batch_dim, target.batch_dim) != (0, 0)
        or x.ragged_dim < 2
        or target.ragged_dim != x.ragged_dim - shift
        or target.shape[target.ragged_dim] != x.shape[x.ragged_dim]
    ):
        raise DispatchError(
            f"{func.__name__}: expected logits [B, C, T] and a target [B, T] of the same rows, got {shown(x)} and "
            f"{shown(target)}; write x.transpose(1, 2) for logits [B, T, C]"
        )
    check_rows_match(func, x, target)


def _batch_size(x: PaddedTensor) -> Any:
    """The extent of the first dimension of a batch: its rows, or the entries of merged ones."""
    if x.merged:
        return x.exists.sum()
    return x.shape[x.batch_dim] if x.row_count is None else x.row_count.squeeze(0)


# ---- losses of two operands ------------------------------------------------------------------------------------


def _beside(func: Any, x: PaddedTensor, t: Any) -> Any:
    """Ones are in the domain of every loss: no derivative there is NaN, and none gets through."""
    return table_beside(func, x, t, 1)


implement_losses(PaddedTensor, first_padded, _beside, PaddedTensor.like_dense, _batch_size)
