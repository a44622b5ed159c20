"""``TimeMajor``: jagged rows with the ragged dimension in front, for modules of ``torch.nn`` that swap it to and back.

The batch dimension of a ``JaggedTensor`` is its first one. ``nn.MultiheadAttention(batch_first=True)`` swaps it with
the next before it calls ``F.multi_head_attention_forward``, and swaps the result again; between the two, nothing but
that function has a meaning for rows that are not first. Recurrent layers without ``batch_first`` take such rows too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subclasses import Outer, TensorSubclass, inner
from subclasses.ragged.base import unruled
from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.registry import Rules

RULES = Rules()


class TimeMajor(TensorSubclass):
    """Jagged rows as ``[T, B, ...]``; ``x.transpose(0, 1)`` makes one of a ``JaggedTensor``, and back.

    Args:
        rows: the rows, ``[B, T, ...]`` and ragged along dimension 1.
    """

    _instead = "write x.transpose(0, 1) first, which gives rows [B, T, ...]"

    rows: JaggedTensor = inner()

    @staticmethod
    def outer(rows: JaggedTensor) -> Outer:
        """The size and the strides of the rows, with the first two swapped."""
        (b, t, *size), (of_b, of_t, *stride) = rows.size(), rows.stride()
        return Outer((t, b, *size), (of_t, of_b, *stride), storage_offset=rows.storage_offset())

    def wrap_cotangent(self, cotangent: Tensor) -> Any:
        """A dense cotangent counts where there are entries."""
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
        return TimeMajor(input)
    return unruled(func, input, dim0, dim1)
