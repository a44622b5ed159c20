"""``einsum`` on both layouts, with a loop over the rows as judge."""

from __future__ import annotations

import torch

from subclasses import DispatchError
from tests.subclasses.ragged.judge import (
    LAYOUTS,
    LENGTHS,
    check_parts,
    desugared,
    eager,
    judged,
    layouts,
    make,
    pairs_of,
    refused,
    stock,
)

ONE = {
    "btd,de->bte": lambda row, w: row @ w,
    "...d,de->...e": lambda row, w: row @ w,
    "btd,de->bet": lambda row, w: (row @ w).mT,
    "btd,de->be": lambda row, w: (row @ w).sum(0),
    "btd,de": lambda row, w: (row @ w).mT,  # in the order of the alphabet
    "b...d,de->b...e": lambda row, w: row @ w,
}
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
EXISTS = torch.arange(max(LENGTHS))[:, None] < torch.tensor(LENGTHS)
# One number for each place and row; NaN where a row has no entry.
EACH = torch.where(EXISTS, torch.arange(20.0, dtype=torch.float64).view(5, 4), torch.nan)
DENSE = {
    "btd,bd->bt": (lambda row, i, t: row @ t[i], (4, 4)),
    "btd,t->bd": (lambda row, i, t: t[: len(row)] @ row, (5,)),
    "btd,tb->btd": (lambda row, i, t: row * t[: len(row), i, None], EACH),
    "btd,tb->bd": (lambda row, i, t: t[: len(row), i] @ row, EACH),
}
WITH_A_MATRIX = {
    equation: (
        lambda x, w, equation=equation: torch.einsum(equation, x, w),
        lambda row, _, w, f=f: f(row, w),
        (4, 6),
    )
    for equation, f in ONE.items()
}


test_with_a_matrix = judged(WITH_A_MATRIX, pairs_of(LAYOUTS, [eager, desugared]), sweep=12)
test_under_stock_compile = judged(
    {"btd,de->bte": WITH_A_MATRIX["btd,de->bte"]}, pairs_of(["back to back", "padded"], [stock])
)
test_with_itself = judged(
    {
        equation: (
            lambda x, equation=equation: torch.einsum(equation, *[x] * (equation.count(",") + 1)),
            lambda row, _, f=f: f(row),
        )
        for equation, f in ITSELF.items()
    }
    | {"as lists": (lambda x: torch.einsum(x, [0, 1, 2], [0, 2]), lambda row, _: row.sum(0))}
)
test_with_dense_operands_that_know_rows_or_places = judged(
    {
        equation: (lambda x, t, equation=equation: torch.einsum(equation, x, t), *case)
        for equation, case in DENSE.items()
    },
    width=max(LENGTHS),
)
test_merged_dimensions = judged(
    {
        "nd,de->ne": (
            lambda x, w: torch.einsum("nd,de->ne", x.flatten(0, 1), w).unflatten(0, x.shape[:2]),
            lambda row, _, w: row @ w,
            (4, 6),
        )
    }
)
test_sums_over_rows = judged(
    {
        "btd,bte->de": (lambda x: torch.einsum("btd,bte->de", x, x), lambda entries: entries.mT @ entries),
        "nd,ne->de": (
            lambda x: torch.einsum("nd,ne->de", *[x.flatten(0, 1)] * 2),
            lambda entries: entries.mT @ entries,
        ),
    },
    whole=True,
)


@layouts
def test_rows_that_lie_elsewhere_and_sums_by_place(layout):
    a, b = make(layout), make("padded" if layout == "padded" else "holes", width=9)
    pairs = list(zip(a.rows, b.rows, strict=True))
    check_parts(a, list(torch.einsum("btd,bte->bde", a.x, b.x)), [p.mT @ q for p, q in pairs])
    check_parts(a, torch.einsum("btd,btd->bt", a.x, b.x), [(p * q).sum(1) for p, q in pairs])
    torch.testing.assert_close(torch.einsum("btd->td", a.x), a.x.sum(0))


SDPA = r"two ragged dimensions; use F\.scaled_dot"
ONE_LETTER = "one letter for the rows of all ragged operands"

test_what_is_refused = refused(
    {
        "two ragged dimensions": (lambda x: torch.einsum("btd,bsd->bts", x, x), DispatchError, SDPA),
        "two letters": (lambda x: torch.einsum("btd,ctd->bc", x, x), DispatchError, ONE_LETTER),
        "an operand too few": (
            lambda x: torch.einsum("btd,de->bte", x),
            ValueError,
            "names 2 operands, got 1",
        ),
        "a letter too few": (
            lambda x: torch.einsum("bt->b", x),
            ValueError,
            "'bt' in 'bt->b' stands for a tensor",
        ),
        "other lengths": (
            lambda x: torch.einsum("btd,btd->bt", x, x[[1, 0, 2, 3]]),
            ValueError,
            "got lengths|other lengths",
        ),
    }
)
test_rows_of_jagged_tensors_come_first = refused(
    {"letters": (lambda x: torch.einsum("btd->tbd", x), DispatchError, "put their letter first")}, LAYOUTS[:2]
)
