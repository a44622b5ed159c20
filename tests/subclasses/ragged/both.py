"""One test for both layouts: jagged batches and padded tables, judged by a loop over the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.subclasses.ragged import judge, padded_judge
from tests.subclasses.ragged.padded_judge import PLACES

LAYOUTS = ["back to back", "holes", "padded"]
JAGGED = judge.LAYOUTS
EVERY = [*JAGGED, *PLACES]
LENGTHS = [3, 0, 5, 1]


def make(
    layout: str, lengths: Sequence[int] = LENGTHS, entry: Sequence[int] = (4,), width: int | None = None
) -> Any:
    """A batch or a table of random rows, the table by the name of its places; what does not exist is NaN."""
    places = "[B, T]" if layout == "padded" else layout
    if places in PLACES:
        wide = max(7, *lengths, 0) if width is None else width
        return padded_judge.make_table(places, lengths, wide, entry)
    return judge.make_batch(layout, lengths=lengths, entry=tuple(entry))


def judge_rows(  # noqa: PLR0913
    layout: str,
    on_ragged: Callable[..., Any],
    on_row: Callable[..., Any],
    parameters: Sequence[Tensor] = (),
    lengths: Sequence[int] = LENGTHS,
    entry: Sequence[int] = (4,),
    way: Callable[..., Any] = judge.eager,
    width: int | None = None,
) -> Any:
    """Values and gradients of ``on_ragged(x, *parameters)``, by ``on_row(row, number, *parameters)``."""
    batch = make(layout, lengths, entry, width)
    got = way(on_ragged)(batch.x, *parameters)
    check_parts(batch, got, [on_row(row, i, *parameters) for i, row in enumerate(batch.rows)], parameters)
    return got


def check_parts(batch: Any, got: Any, expected: Any, parameters: Sequence[Tensor] = ()) -> None:
    """Compares a result with its parts, and the gradients that flow back from it."""
    if isinstance(batch, padded_judge.Table):
        return padded_judge.check_parts(batch, got, list(expected), parameters)
    parts = got.to_tensors() if isinstance(got, JaggedTensor) else list(got)
    return judge.check_parts(batch, parts, expected, parameters)


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


def random(*shape: int) -> Tensor:
    """A parameter."""
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def row_dim(batch: Any) -> int:
    """The ragged dimension, in a row."""
    return batch.ragged_dim - (batch.batch_dim < batch.ragged_dim)


def hold(layout: str, rows: Sequence[Tensor]) -> Any:
    """A value of these rows; what does not exist is NaN, or an index out of range."""
    batch = make(layout, [len(row) for row in rows], rows[0].shape[1:])
    nothing = float("nan") if rows[0].is_floating_point() else 10**9
    x, stored = batch.x.detach(), torch.full(batch.leaf.shape, nothing, dtype=rows[0].dtype)
    made = x.with_values(stored) if isinstance(x, JaggedTensor) else x.with_padded(stored)
    for mine, row in zip(made.to_tensors(), rows, strict=True):
        mine.copy_(row)
    return made
