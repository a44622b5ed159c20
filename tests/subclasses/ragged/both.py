"""One test for both layouts: jagged batches and padded tables, judged by a loop over the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.subclasses.ragged import judge, padded_judge

LAYOUTS = ["back to back", "holes", "padded"]
LENGTHS = [3, 0, 5, 1]


def make(layout: str, lengths: Sequence[int] = LENGTHS, entry: Sequence[int] = (4,)) -> Any:
    """A batch or a table of random rows; what does not exist is NaN."""
    if layout == "padded":
        return padded_judge.make_table(lengths=lengths, entry=entry)
    return judge.make_batch(layout, lengths=lengths, entry=tuple(entry))


def judge_rows(  # noqa: PLR0913
    layout: str,
    on_ragged: Callable[..., Any],
    on_row: Callable[..., Any],
    parameters: Sequence[Tensor] = (),
    lengths: Sequence[int] = LENGTHS,
    entry: Sequence[int] = (4,),
    way: Callable[..., Any] = judge.eager,
) -> Any:
    """Values and gradients of ``on_ragged(x, *parameters)``, by ``on_row(row, number, *parameters)``."""
    batch = make(layout, lengths, entry)
    if layout == "padded":
        return padded_judge.check_padded(batch, on_ragged, on_row, parameters, way)
    return judge.check_rows(batch, way(on_ragged), on_row, parameters)


def pair_of(layout: str, lengths: Sequence[int] = LENGTHS) -> tuple[Any, Any]:
    """Two values with rows of the same lengths, which lie elsewhere in memory."""
    rows = [[torch.randn(n, 4, dtype=torch.float64) for n in lengths] for _ in range(2)]
    if layout == "padded":
        x, y = (PaddedTensor.from_tensors(r, multiple=m) for r, m in zip(rows, (7, 8), strict=True))
        return x, y
    x, y = (JaggedTensor.from_tensors(r) for r in rows)
    if layout == "holes":
        wide = JaggedTensor.from_tensors([torch.cat([row, row[:1] * torch.nan]) for row in rows[1]])
        y = JaggedTensor(wide.values, wide.offsets, lengths=torch.tensor(lengths))
    return x, y
