"""``einsum`` on both layouts, with a loop over the rows as judge."""

from __future__ import annotations

import pytest
import torch

from tests.subclasses.ragged.both import LAYOUTS, LENGTHS, judge_rows, make, pair_of, random
from tests.subclasses.ragged.judge import desugared, eager, stock

W = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)

ONE = {
    "btd,de->bte": lambda row, w: row @ w,
    "...d,de->...e": lambda row, w: row @ w,
    "btd,de->bet": lambda row, w: (row @ w).mT,
    "btd,de->be": lambda row, w: (row @ w).sum(0),
    "btd,de": lambda row, w: (row @ w).mT,  # in the order of the alphabet
    "b...d,de->b...e": lambda row, w: row @ w,
}


@pytest.mark.sweep(12)
@pytest.mark.parametrize("way", [eager, desugared], ids=lambda w: w.__name__)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("equation", ONE)
def test_with_a_matrix(equation, layout, way):
    f = ONE[equation]
    judge_rows(layout, lambda x, w: torch.einsum(equation, x, w), lambda row, _, w: f(row, w), [W], way=way)


@pytest.mark.parametrize("layout", ["back to back", "padded"])
def test_under_stock_compile(layout):
    judge_rows(
        layout, lambda x, w: torch.einsum("btd,de->bte", x, w), lambda row, _, w: row @ w, [W], way=stock
    )


ITSELF = {
    "btd,btd->bt": lambda row: (row * row).sum(-1),
    "btd,bte->bde": lambda row: row.mT @ row,
    "btd,btd->b": lambda row: (row * row).sum(),
    "btd,bse->bde": lambda row: row.sum(0)[:, None] * row.sum(0),
    "btd,bsd->bt": lambda row: row @ row.sum(0),
    "btd->bd": lambda row: row.sum(0),
    "btd->bdt": lambda row: row.mT,
    "btd->bt": lambda row: row.sum(1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("equation", ITSELF)
def test_with_itself(equation, layout):
    operands = equation.count(",") + 1
    judge_rows(
        layout, lambda x: torch.einsum(equation, *[x] * operands), lambda row, _: ITSELF[equation](row)
    )


def each_place_and_row(width):
    """One number for each; NaN where a row has no entry."""
    each = torch.randn(width, len(LENGTHS), dtype=torch.float64)
    exists = torch.arange(width)[:, None] < torch.tensor(LENGTHS)
    return torch.where(exists, each, torch.nan)


DENSE = {
    "btd,bd->bt": (lambda width: random(len(LENGTHS), 4), lambda row, i, t: row @ t[i]),
    "btd,t->bd": (lambda width: random(width), lambda row, i, t: t[: len(row)] @ row),
    "btd,tb->btd": (each_place_and_row, lambda row, i, t: row * t[: len(row), i, None]),
    "btd,tb->bd": (each_place_and_row, lambda row, i, t: t[: len(row), i] @ row),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("equation", DENSE)
def test_with_dense_operands_that_know_rows_or_places(equation, layout):
    make_dense, of_row = DENSE[equation]
    dense = make_dense(make(layout).x.shape[1])
    judge_rows(layout, lambda x, t: torch.einsum(equation, x, t), of_row, [dense])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_other_way_to_write_it(layout):
    judge_rows(layout, lambda x: torch.einsum(x, [0, 1, 2], [0, 2]), lambda row, _: row.sum(0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_over_rows(layout):
    batch = make(layout)
    together = torch.cat(batch.rows)
    torch.testing.assert_close(torch.einsum("btd,bte->de", batch.x, batch.x), together.mT @ together)
    by_place = torch.einsum("btd->td", batch.x)
    torch.testing.assert_close(by_place, batch.x.sum(0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_merged_dimensions(layout):
    judge_rows(
        layout,
        lambda x, w: torch.einsum("nd,de->ne", x.flatten(0, 1), w).unflatten(0, x.shape[:2]),
        lambda row, _, w: row @ w,
        [W],
    )
    batch = make(layout)
    merged, together = batch.x.flatten(0, 1), torch.cat(batch.rows)
    torch.testing.assert_close(torch.einsum("nd,ne->de", merged, merged), together.mT @ together)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_lie_elsewhere(layout):
    x, y = pair_of(layout)
    expected = [a.mT @ b for a, b in zip(x.to_tensors(), y.to_tensors(), strict=True)]
    torch.testing.assert_close(list(torch.einsum("btd,bte->bde", x, y)), expected)
    expected = [(a * b).sum(1) for a, b in zip(x.to_tensors(), y.to_tensors(), strict=True)]
    torch.testing.assert_close(torch.einsum("btd,btd->bt", x, y).to_tensors(), expected)


REFUSED = {
    "two ragged dimensions": (
        lambda x, layout: torch.einsum("btd,bsd->bts", x, x),
        NotImplementedError,
        r"two ragged dimensions; use F\.scaled_dot",
    ),
    "two letters for the rows": (
        lambda x, layout: torch.einsum("btd,ctd->bc", x, x),
        NotImplementedError,
        "one letter for the rows of all ragged operands",
    ),
    "an operand too few": (
        lambda x, layout: torch.einsum("btd,de->bte", x),
        ValueError,
        "names 2 operands, got 1",
    ),
    "a letter too few": (
        lambda x, layout: torch.einsum("bt->b", x),
        ValueError,
        "'bt' in 'bt->b' stands for a tensor",
    ),
    "other lengths": (
        lambda x, layout: torch.einsum("btd,btd->bt", x, make(layout, [2, 2, 2, 2]).x),
        ValueError,
        "got lengths|other lengths",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, layout):
    f, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        f(make(layout).x, layout)


@pytest.mark.parametrize("layout", ["back to back", "holes"])
def test_rows_of_jagged_tensors_come_first(layout):
    with pytest.raises(NotImplementedError, match="put their letter first"):
        torch.einsum("btd->tbd", make(layout).x)
