"""Losses that are a few ruled ops: their own kernels would sum below autograd, or count classes by the outer size."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from subclasses.errors import DispatchError


def implement_margins(cls: Any) -> None:
    """The rules of the losses below for a layout."""
    cls.implements(F.margin_ranking_loss)(_margin_ranking)
    cls.implements(F.cosine_embedding_loss)(_cosine_embedding)
    cls.implements(F.triplet_margin_loss)(_triplet_margin)
    cls.implements(F.multilabel_soft_margin_loss)(_multilabel_soft_margin)


def reduced(
    func: Any, loss: Any, reduction: str = "mean", size_average: Any = None, reduce: Any = None
) -> Any:
    """A loss of each entry, reduced as losses are."""
    if size_average is not None or reduce is not None:
        raise DispatchError(f"{func.__name__}: size_average and reduce are deprecated; use reduction")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{func.__name__}: {reduction} is not a valid value for reduction")
    return loss if reduction == "none" else getattr(loss, reduction)()


def _margin_ranking(func: Any, input1: Any, input2: Any, target: Any, margin: float = 0, **how: Any) -> Any:
    return reduced(func, (margin - target * (input1 - input2)).clamp_min(0), **how)


def _cosine_embedding(func: Any, input1: Any, input2: Any, target: Any, margin: float = 0, **how: Any) -> Any:
    lengths = [(x * x).sum(-1) + 1e-12 for x in (input1, input2)]
    cosine = (input1 * input2).sum(-1) / (lengths[0] * lengths[1]).sqrt()
    apart = (cosine - margin).clamp_min(0)
    return reduced(func, (1 - cosine) * (target == 1) + apart * (target == -1), **how)


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
    return reduced(func, (margin + near - far).clamp_min(0), **how)


def _multilabel_soft_margin(func: Any, input: Any, target: Any, weight: Any = None, **how: Any) -> Any:
    loss = -(target * F.logsigmoid(input) + (1 - target) * F.logsigmoid(-input))
    loss = loss if weight is None else loss * weight
    return reduced(func, loss.mean(-1), **how)
