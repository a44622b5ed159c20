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
@pytest.mark.parametrize("name", ["tensor_split", "vsplit"])
@pytest.mark.parametrize("where", [1, 2, 3, 7, [1, 3], [-1]], ids=str)
def test_of_the_batch(where, name, layout):
    batch = make(layout, LENGTHS)
    if name == "vsplit" and isinstance(where, int) and where > 1:
        where = [where]  # as many rows for each
    got = [part.to_tensors() for part in getattr(batch.x, name)(where)]
    numbers = [part.tolist() for part in torch.arange(5).tensor_split(where)]
    torch.testing.assert_close(got, [[batch.rows[n] for n in part] for part in numbers])


OTHER_NAMES = {
    "features": (lambda x: x.tensor_split(3, -1)[0], lambda row: row.tensor_split(3, -1)[0]),
    "hsplit": (lambda x: x.hsplit([2])[1], lambda row: row[2:]),
    "dsplit": (lambda x: x.dsplit(2)[1], lambda row: row[:, 2:]),
}


@layouts
@pytest.mark.parametrize("name", OTHER_NAMES)
def test_of_features_and_by_other_names(name, layout):
    on_ragged, on_row = OTHER_NAMES[name]
    judge_rows(layout, on_ragged, lambda row, _: on_row(row))


REFUSED = {
    "merged": (lambda x, layout: x.flatten(0, 1).tensor_split(2), NotImplementedError, "merged dimensions"),
    "no such dimension": (lambda x, layout: x.tensor_split(2, 3), IndexError, "has no dimension 3"),
    "no section": (lambda x, layout: x.tensor_split(0, 1), RuntimeError, "1 section or more"),
    "no chunk": (lambda x, layout: x.chunk(0, 1), RuntimeError, "at least 1 chunk"),
    "a remainder": (lambda x, layout: x.dsplit(3), RuntimeError, "no multiple of 3"),
}


@layouts
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, layout):
    f, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        f(make(layout).x, layout)
