"""``TimeMajor``: jagged rows with the ragged dimension first, for ``torch.nn`` modules that transpose their inputs.

The batch dimension of a ``JaggedTensor`` is dimension 0. ``nn.MultiheadAttention(batch_first=True)`` transposes
dimensions 0 and 1, calls ``F.multi_head_attention_forward``, and transposes the result back. Between the two, no other
function supports rows that are not first. Recurrent layers without ``batch_first``, and ``F.ctc_loss``, take such rows
too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subclasses import Outer, TensorSubclass, inner
from subclasses.ragged.base import unruled
from subclasses.ragged.checks import check_all_exist
from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.registry import Rules

RULES = Rules()


class TimeMajor(TensorSubclass):
    """Jagged rows as ``[T, B, ...]``; ``x.transpose(0, 1)`` makes one of a ``JaggedTensor``, and converts it back.

    Args:
        rows: the rows, ``[B, T, ...]`` and ragged along dimension 1.
    """

    _instead = "write x.transpose(0, 1) first, which gives rows [B, T, ...]"

    rows: JaggedTensor = inner()

    @staticmethod
    def outer(rows: JaggedTensor) -> Outer:
        """Returns the size and the strides of the rows, with the first two swapped."""
        (b, t, *size), (of_b, of_t, *stride) = rows.size(), rows.stride()
        return Outer((t, b, *size), (of_t, of_b, *stride), storage_offset=rows.storage_offset())

    def to_dense(self, fill: float | int | bool = 0) -> Tensor:  # type: ignore[override]
        """Returns the padded tensor ``[T, B, ...]``, with ``fill`` where there is no entry."""
        rows: Any = self.unwrap("rows")
        return rows.to_dense(fill).transpose(0, 1)

    def wrap_cotangent(self, cotangent: Tensor) -> Any:
        """Returns a dense cotangent as a ragged one, with its values at existing entries."""
        return type(self)(self.rows.wrap_cotangent(cotangent.transpose(0, 1)))


def _swaps_the_first(x: Any, dim0: int, dim1: int) -> bool:
    return {d + x.dim() if d < 0 else d for d in (dim0, dim1)} == {0, 1}


@TimeMajor.implements(torch.transpose, torch.swapaxes, torch.swapdims)
def _rows_first(func: Any, input: Any, dim0: int, dim1: int) -> Any:
    if _swaps_the_first(input, dim0, dim1):
        return input.unwrap("rows")
    return unruled(func, input, dim0, dim1)


@RULES.of(torch.transpose, torch.swapaxes, torch.swapdims)
def _rows_second(func: Any, input: Any, dim0: int, dim1: int) -> Any:
    if input.rows_first and input.ragged_dim == 1 and _swaps_the_first(input, dim0, dim1):
        check_all_exist(input, func.__name__)
        return TimeMajor(input)
    return unruled(func, input, dim0, dim1)
