"""``tensor_split`` and ``chunk``, on both layouts, with a loop over the rows as judge."""

from __future__ import annotations

import pytest
import torch

from tests.subclasses.ragged.both import LAYOUTS, judge_rows, make
from tests.subclasses.ragged.judge import desugared, eager

LENGTHS = [3, 0, 5, 1, 4]
layouts = pytest.mark.parametrize("layout", LAYOUTS)
ways = pytest.mark.parametrize("way", [eager, desugared], ids=lambda w: w.__name__)


@pytest.mark.sweep(54)
@ways
@layouts
@pytest.mark.parametrize("where", [1, 2, 3, 7, [1, 3], (2,), [-1], [0, 2, 2], torch.tensor([1, 2])], ids=str)
def test_of_rows(where, layout, way):
    if way is desugared and isinstance(where, torch.Tensor):
        pytest.skip("read in eager mode only")
    count = where if isinstance(where, int) else len(where) + 1
    for i in range(count) if way is eager else {0, count - 1}:  # each part is a program
        judge_rows(
            layout,
            lambda x, i=i: x.tensor_split(where, 1)[i],
            lambda row, _, i=i: row.tensor_split(where, 0)[i],
            lengths=LENGTHS,
            way=way,
        )


@layouts
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_chunks_of_rows(chunks, layout):
    for i in range(chunks):

        def chunk(row, _, i=i):
            size = -(-len(row) // chunks)
            return row[size * i : size * (i + 1)]

        judge_rows(layout, lambda x, i=i: x.chunk(chunks, 1)[i], chunk, lengths=LENGTHS)


@layouts
@pytest.mark.parametrize("where", [1, 2, 3, 7, [1, 3], [-1]], ids=str)
def test_of_the_batch(where, layout):
    batch = make(layout, LENGTHS)
    got = [part.to_tensors() for part in batch.x.tensor_split(where)]
    numbers = [part.tolist() for part in torch.arange(5).tensor_split(where)]
    torch.testing.assert_close(got, [[batch.rows[n] for n in part] for part in numbers])


@layouts
def test_of_features_and_by_other_names(layout):
    judge_rows(layout, lambda x: x.tensor_split(3, -1)[0], lambda row, _: row.tensor_split(3, -1)[0])
    judge_rows(layout, lambda x: x.hsplit([2])[1], lambda row, _: row[2:])
    judge_rows(layout, lambda x: x.dsplit(2)[1], lambda row, _: row[:, 2:])
    batch = make(layout, LENGTHS)
    torch.testing.assert_close(batch.x.vsplit([2])[1].to_tensors(), batch.rows[2:])


@layouts
def test_what_is_refused(layout):
    x = make(layout).x
    with pytest.raises(NotImplementedError, match="merged dimensions"):
        x.flatten(0, 1).tensor_split(2)
    with pytest.raises(IndexError, match="has no dimension 3"):
        x.tensor_split(2, 3)
    with pytest.raises(RuntimeError, match="1 section or more"):
        x.tensor_split(0, 1)
    with pytest.raises(RuntimeError, match="at least 1 chunk"):
        x.chunk(0, 1)
    with pytest.raises(RuntimeError, match="no multiple of 3"):
        x.dsplit(3)
