"""``JaggedTensor.pack``: rows in a fixed number of entries, rows and positions, so that all batches have one size.

Spare rows hold the tail of the entries. None is longer than the longest row may be, as kernels for rows require.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from subclasses.ragged.checks import check_rows


def pack_rows(
    tensors: Sequence[Tensor], tokens: int, rows: int | None, longest: int | None
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Returns values, offsets, count and ``max_length`` of a batch that fills a budget; see ``JaggedTensor.pack``."""
    check_rows(tensors, method="pack")
    lengths = [len(t) for t in tensors]
    longest = max(1, *lengths) if longest is None else longest
    total, count = sum(lengths), len(lengths)
    _check_budget("tokens", tokens, total, f"{total} tokens in {count} rows")
    _check_budget("longest", longest, max(1, *lengths), f"a row of {max(lengths)} tokens")
    tail = tokens - total
    spare = -(-tail // longest)
    rows = count + spare if rows is None else rows
    needed = f"{count} rows and {spare} spare rows of at most {longest} tokens for the tail of {tail} tokens"
    _check_budget("rows", rows, count + spare, needed)
    ends = [*accumulate(lengths), *(min(total + longest * (i + 1), tokens) for i in range(rows - count))]
    first = tensors[0]
    values = torch.cat([*tensors, first.new_zeros(tail, *first.shape[1:])])
    offsets = torch.tensor([0, *ends], device=first.device)
    return values, offsets, torch.tensor(count, device=first.device), longest


def _check_budget(name: str, budget: int, needed: int, given: str) -> None:
    if needed > budget:
        raise ValueError(
            f"JaggedTensor.pack: {name}={budget} is exceeded by {needed - budget}, got {given}; pass fewer rows, or "
            f"{name}={needed}"
        )
