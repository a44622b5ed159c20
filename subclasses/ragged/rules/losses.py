"""Losses: of two operands, of classes, and losses composed of ops with rules.

PyTorch's own kernels would sum below autograd, or divide by the outer size. Here a loss is computed for each entry, and
the mean divides by the number of existing entries.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.base import first_ragged, is_ragged, shown
from subclasses.ragged.registry import Rules

RULES = Rules()

# Losses of two operands.
ELEMENTWISE = (
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.gaussian_nll_loss,
    F.hinge_embedding_loss,
    F.huber_loss,
    F.kl_div,
    F.l1_loss,
    F.mse_loss,
    F.poisson_nll_loss,
    F.smooth_l1_loss,
    F.soft_margin_loss,
)


def _reduced(
    func: Any, loss: Any, reduction: str = "mean", size_average: Any = None, reduce: Any = None
) -> Any:
    """Reduces the losses of the entries."""
    if size_average is not None or reduce is not None:
        raise DispatchError(
            f"{func.__name__}: size_average and reduce are deprecated",
            code="argument-refused",
            hint="use reduction",
        )
    if reduction not in ("none", "mean", "sum"):
        more = ", 'batchmean'" if func is F.kl_div else ""
        raise ValueError(
            f"{func.__name__}: expected reduction 'none', 'mean'{more} or 'sum', got {reduction!r}"
        )
    return loss if reduction == "none" else getattr(loss, reduction)()


# ---- losses of two operands ------------------------------------------------------------------------------------


@RULES.of(*ELEMENTWISE)
def _elementwise(
    func: Any, input: Any, target: Any, *args: Any, reduction: str = "mean", **kwargs: Any
) -> Any:
    x = first_ragged((input, target))
    if any(v is not None for v in (kwargs.pop("size_average", None), kwargs.pop("reduce", None))):
        raise DispatchError(
            f"{func.__name__}: size_average and reduce are deprecated",
            code="argument-refused",
            hint="use reduction",
        )
    operands = [x.operand(func, t) for t in (input, target, *args)]
    kwargs = {k: x.operand(func, v) for k, v in kwargs.items()}
    loss = x.with_kept(func(*operands, reduction="none", **kwargs))
    if reduction == "batchmean" and func is F.kl_div:
        return loss.sum() / x.batch_size()
    return _reduced(func, loss, reduction)


# ---- losses composed of ops with rules --------------------------------------------------------------------------


@RULES.of(F.margin_ranking_loss)
def _margin_ranking(func: Any, input1: Any, input2: Any, target: Any, margin: float = 0, **how: Any) -> Any:
    return _reduced(func, (margin - target * (input1 - input2)).clamp_min(0), **how)


@RULES.of(F.cosine_embedding_loss)
def _cosine_embedding(func: Any, input1: Any, input2: Any, target: Any, margin: float = 0, **how: Any) -> Any:
    lengths = [(x * x).sum(-1) + 1e-12 for x in (input1, input2)]
    cosine = (input1 * input2).sum(-1) / (lengths[0] * lengths[1]).sqrt()
    apart = (cosine - margin).clamp_min(0)
    return _reduced(func, (1 - cosine) * (target == 1) + apart * (target == -1), **how)


@RULES.of(F.triplet_margin_loss)
def _triplet_margin(  # noqa: PLR0913
    func: Any,
    anchor: Any,
    positive: Any,
    negative: Any,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    **how: Any,
) -> Any:
    near, far = (F.pairwise_distance(anchor, t, p, eps) for t in (positive, negative))
    if swap:
        far = torch.minimum(far, F.pairwise_distance(positive, negative, p, eps))
    return _reduced(func, (margin + near - far).clamp_min(0), **how)


@RULES.of(F.multilabel_soft_margin_loss)
def _multilabel_soft_margin(func: Any, input: Any, target: Any, weight: Any = None, **how: Any) -> Any:
    loss = -(target * F.logsigmoid(input) + (1 - target) * F.logsigmoid(-input))
    loss = loss if weight is None else loss * weight
    return _reduced(func, loss.mean(-1), **how)


# ---- losses of classes -----------------------------------------------------------------------------------------


@RULES.of(F.cross_entropy, F.nll_loss)
def _cross_entropy(  # noqa: PLR0913
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
        raise DispatchError(
            f"{func.__name__}: size_average and reduce are deprecated",
            code="argument-refused",
            hint="use reduction",
        )
    dims = input.dim()
    if not is_ragged(input) or dims < 2 or 1 in input.row_dims:
        raise DispatchError(
            f"{func.__name__}: expected ragged logits [N, C] of merged dimensions, or [B, C, T], got {shown(input)} "
            f"beside {shown(target)}",
            code="rows-apart",
            hint="write x.flatten(0, 1) or x.transpose(1, 2)",
        )
    target = _target_beside(func, input, target, dims)
    of_classes = target.is_floating_point()
    counted_here = reduction == "none" or (of_classes and input.has_gaps)
    smoothing = {"label_smoothing": label_smoothing} if func is F.cross_entropy else {}
    loss = func(
        input.samples(0),
        target.samples(0 if of_classes else ignore_index),
        weight=weight,
        ignore_index=ignore_index,
        reduction="none" if counted_here else reduction,
        **smoothing,
    )
    if not counted_here:
        return loss
    batch, ragged = _without_classes(input.row_dims)
    loss = input.from_samples(loss, ragged, batch)
    return _reduced(func, loss, reduction)


def _target_beside(func: Any, x: Any, target: Any, dims: int) -> Any:
    """Returns the target as a ragged tensor with its entries at the stored positions of the entries of ``x``."""
    of_classes = target.is_floating_point()
    if not isinstance(target, x.ragged_class):
        target = (x if of_classes else x.detach().select(1, 0)).like_dense(target)
    row_dims = x.row_dims if of_classes else _without_classes(x.row_dims)
    if target.row_dims != row_dims or target.dim() != dims - (not of_classes):
        raise DispatchError(
            f"{func.__name__}: {shown(x)} and the target {shown(target)} do not fit together",
            code="rows-apart",
            hint="expected logits [N, C] and a target [N], or logits [B, C, T] and a target [B, T]",
        )
    return x.alongside(func, target)


def _without_classes(rows: tuple[int, int]) -> tuple[int, int]:
    """Returns the dimensions of the rows after dimension 1 is removed."""
    batch, ragged = rows
    return batch - (batch > 1), ragged - (ragged > 1)
