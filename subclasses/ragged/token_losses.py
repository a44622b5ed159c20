"""Mean losses over the tokens of all ranks, which have different numbers of tokens.

The mean of the ranks' means gives a token more weight if its rank has fewer tokens. Here every token of the joint batch
has the same weight, as in one process.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def weighted_loss(
    loss_sum: Tensor, tokens: int | Tensor, *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Returns the loss to call ``backward`` on, for the gradient of the mean loss over the tokens of all ranks.

    ``DistributedDataParallel`` and FSDP2 (``fully_shard``) *average* gradients over ``world_size`` ranks. For
    the average to be ``sum of all losses / total_tokens``, each rank returns::

        loss_sum * world_size / total_tokens

    where ``total_tokens`` is the sum of ``tokens`` over the ranks, by one ``all_reduce``. All ranks must call this
    in each step. The mean of the results over the ranks is the loss of the joint batch.

    Args:
        loss_sum: ``[]``, the sum of the losses of this rank's tokens, of a floating-point dtype. Half precision is
            scaled in float32.
        tokens: the number of tokens: an int, or ``[]`` of an integer dtype. If a step accumulates the gradients of
            several batches, the number in all of this rank's batches of the step.
        group: the ranks that gradients are averaged over; None: the default group, or one process without any.

    Returns:
        ``[]``, differentiable in ``loss_sum``; 0 where no rank has a token.

    Raises:
        TypeError: ``loss_sum`` is not one floating-point number, or ``tokens`` not one integer.
        ValueError: ``tokens`` is a negative int.
    """
    count = _as_count(loss_sum, tokens, "weighted_loss")
    ranks = 1
    if _is_distributed():
        dist.all_reduce(count, group=group)
        ranks = dist.get_world_size(group)
    wide = torch.promote_types(loss_sum.dtype, torch.float32)
    return loss_sum * (ranks / count.clamp(min=1).to(wide))


def mean_over_ranks(
    loss_sum: Tensor, tokens: int | Tensor, *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Returns the mean loss over the tokens of all ranks, for evaluation; one process with all rows returns the same.

    Add up the losses and the tokens of all batches first; then one ``all_reduce`` of both is enough.

    Args:
        loss_sum: ``[]``, the sum of the losses of all tokens of this rank, of a floating-point dtype.
        tokens: the number of tokens: an int, or ``[]`` of an integer dtype.
        group: the ranks; None: the default group, or one process without any.

    Returns:
        ``[]`` float64 without a gradient, the same on all ranks; NaN where no rank has a token.

    Raises:
        TypeError: ``loss_sum`` is not one floating-point number, or ``tokens`` not one integer.
        ValueError: ``tokens`` is a negative int.
    """
    count = _as_count(loss_sum, tokens, "mean_over_ranks")
    sums = torch.stack([loss_sum.detach().double(), count.double()])
    if _is_distributed():
        dist.all_reduce(sums, group=group)
    return sums[0] / sums[1]


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _as_count(loss_sum: Tensor, tokens: int | Tensor, name: str) -> Tensor:
    """Returns ``tokens`` as a new int64 tensor on the loss's device; raises before any rank waits for another."""
    if not isinstance(loss_sum, Tensor) or loss_sum.dim() or not loss_sum.is_floating_point():
        raise TypeError(
            f"{name}: expected the sum of the losses as a floating-point tensor [], got {_described(loss_sum)}; use "
            f'reduction="sum"'
        )
    count = torch.as_tensor(tokens)
    if count.dim() or count.dtype == torch.bool or count.is_floating_point() or count.is_complex():
        raise TypeError(f"{name}: expected the number of tokens as one integer, got {_described(tokens)}")
    if not isinstance(tokens, Tensor) and tokens < 0:
        raise ValueError(f"{name}: expected at least 0 tokens, got {tokens}")
    return count.detach().to(loss_sum.device, torch.int64, copy=True)


def _described(x: object) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
