"""The loss of connectionist temporal classification: the frames of each row against the labels of that row."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.base import is_ragged, shown
from subclasses.ragged.checks import check_reached
from subclasses.ragged.modules.time_major import TimeMajor
from subclasses.ragged.registry import Rules

RULES = Rules()


@RULES.of(F.ctc_loss, torch.ctc_loss)
def _ctc_loss(  # noqa: PLR0913
    func: Any,
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Computes the loss of frames ``[T, B, C]``; targets are dense, or rows ``[B, S]``.

    Raises:
        DispatchError: the frames are not ragged along dimension 0.
        RuntimeError: a row has fewer frames than its input length (on CUDA and in graphs by an asynchronous assertion).
    """
    if not isinstance(log_probs, TimeMajor) and getattr(log_probs, "row_dims", None) != (1, 0):
        raise DispatchError(
            f"ctc_loss: expected log_probs [T, B, C], ragged along 0, got {shown(log_probs)}",
            code="row-dims",
            hint="write x.transpose(0, 1) for rows [B, T, C]",
        )
    rows: Any = log_probs.transpose(0, 1)
    input_lengths, target_lengths = (
        torch.as_tensor(n, device=rows.device) for n in (input_lengths, target_lengths)
    )
    check_reached(
        rows, input_lengths, f"ctc_loss: a row of {shown(rows)} has fewer frames than its input length"
    )
    targets = targets.to_dense() if is_ragged(targets) else targets
    frames = rows.to_dense().transpose(0, 1)
    loss = F.ctc_loss(frames, targets, input_lengths, target_lengths, blank, "none", zero_infinity)
    if reduction in ("mean", 1):
        return rows.per_row(loss / target_lengths.clamp(min=1), 0).mean()
    loss = rows.per_row(loss, 0)
    return loss.sum() if reduction in ("sum", 2) else loss
