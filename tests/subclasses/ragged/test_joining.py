"""Rows and entries that are joined, repeated and cut, and ops on lists, with a loop over the rows as judge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from subclasses import DispatchError
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.subclasses.ragged.judge import (
    LAYOUTS,
    PLACES,
    WAYS,
    alike,
    check_parts,
    desugared,
    eager,
    judged,
    judged_by_rows,
    layouts,
    make,
    make_batch,
    make_table,
    numbers_of,
    pairs_of,
    random,
    refused,
    row_dim,
    stock,
    ways,
)
from tests.tables import giving, raising

NOTHING = torch.tensor([])  # skipped as for dense tensors; a cache of transformers begins with it

test_entries_and_features_of_each_row = judged(
    {
        "entries": (
            lambda x: torch.cat([x, x * 2, x[:, :1]], 1),
            lambda row, _: torch.cat([row, row * 2, row[:1]]),
        ),
        "nothing, and rows": (lambda x: torch.cat([NOTHING, x]), lambda row, _: row),
        "entries, and nothing": (lambda x: torch.cat([x, NOTHING], 1), lambda row, _: row),
        "nothing, and features": (lambda x: torch.cat([NOTHING, x], -1), lambda row, _: row),
        "dense entries": (
            lambda x, first, many: torch.cat([first.expand(4, 1, 4), x, many], 1),
            lambda row, i, first, many: torch.cat([first[None], row, many[i]]),
            (4,),
            (4, 2, 4),
        ),
        "dense features": (
            lambda x, p: torch.cat([p[:, : x.shape[1]], x], 2),
            lambda row, i, p: torch.cat([p[i, : len(row)], row], 1),
            (4, 7, 2),
        ),
        "features": alike(lambda t: torch.cat([t, t * 2], -1)),
        "stacked": (
            lambda x: torch.stack([x, x * 2], 2, out=None),
            lambda row, _: torch.stack([row, row * 2], 1),
        ),
    },
    pairs_of(LAYOUTS, [eager, desugared]),
    sweep=3,
)


# Of a batch, and of the list of its rows.
OF_BATCHES = {
    "dense rows before and after": (
        lambda x, p: torch.cat([p, x, p]) * 1,
        lambda rows, p: [*p, *rows, *p],
        (2, 6, 4),
    ),
    "rows after rows": (
        lambda x: torch.cat([x, x[1:, :2] * 2]),
        lambda rows: [*rows, *(row[:2] * 2 for row in rows[1:])],
    ),
}


ELSEWHERE = [*PLACES, "ragged dim 2"]


def entries_at(place):
    """Entries of each row that follow each other; the place is that in a row."""
    return (
        lambda x, y: torch.cat([x, y, x * 2], x.ragged_dim) * 1,
        lambda rows, others: [torch.cat([p, q, p * 2], place) for p, q in zip(rows, others, strict=True)],
        lambda layout: make(layout, [1, 0, 0, 6], width=6),
    )


test_entries_elsewhere, test_entries_at_the_second_place = (
    judged_by_rows({"entries": entries_at(place)}, pairs_of(layouts, WAYS), sweep=8)
    for place, layouts in enumerate((ELSEWHERE[:2], ELSEWHERE[2:]))
)
test_rows_elsewhere = judged_by_rows(
    {
        "rows": (
            lambda x, y: torch.cat([x, y], x.batch_dim if isinstance(x, PaddedTensor) else 0) * 1,
            lambda rows, others: [*rows, *others],
            lambda layout: make(layout, [1, 0], width=9),
        )
    },
    pairs_of(ELSEWHERE, WAYS),
    sweep=6,
)
NO_ROWS, SHORT = make_batch(lengths=[]).x, make_batch(lengths=[2, 0]).x
test_batches_without_rows = giving(
    {
        "beside some": (lambda: torch.cat([NO_ROWS, SHORT, NO_ROWS]).row_lengths().tolist(), [2, 0]),
        "and entries": (lambda: torch.cat([NO_ROWS, NO_ROWS], 1).row_lengths().tolist(), []),
    }
)

OTHERS = r"do not join|into a new one|as many dimensions"
OUT = torch.zeros(())

test_what_is_refused = refused(
    {
        "other features": (lambda x: torch.cat([x, x[..., :2]]), NotImplementedError, OTHERS),
        "more dimensions": (lambda x: torch.cat([x, x.unsqueeze(-1)], 1), NotImplementedError, OTHERS),
        "dense rows": (lambda x: torch.cat([x, random(3, 2, 4)], 1), NotImplementedError, OTHERS),
        "a dense row": (lambda x: torch.cat([random(2, 4), x], 1), NotImplementedError, OTHERS),
        "cat into a tensor": (lambda x: torch.cat([x, x], -1, out=OUT), NotImplementedError, OTHERS),
        "stack into a tensor": (lambda x: torch.stack([x, x], -1, out=OUT), NotImplementedError, OTHERS),
    }
)


# ---- growing ---------------------------------------------------------------------------------------------------


@pytest.mark.sweep(4)
@pytest.mark.parametrize("places", PLACES)
@ways
def test_append(places, way):
    table = make_table(places)
    b, r, place = table.batch_dim, table.ragged_dim, row_dim(table)
    new = random(*(n for d, n in enumerate(table.leaf.shape) if d != r))
    got = way(lambda x, new: x.append(new) * 1)(table.x, new)
    pairs = zip(table.rows, new.unbind(b - (r < b)), strict=True)
    expected = [torch.cat([row, one.unsqueeze(place)], place) for row, one in pairs]
    check_parts(table, got, expected, [new])


FULL = PaddedTensor.from_tensors([torch.arange(3), torch.arange(1)])
test_append_needs_room = raising(
    {
        "no room": (lambda: FULL.append(torch.tensor([7, 7])), RuntimeError, "fills the table"),
        "an entry too few": (
            lambda: FULL.append(torch.tensor([7])),
            ValueError,
            r"one entry for each row, of shape \(2,\)",
        ),
    }
)
test_a_wider_table_has_room = giving(
    {
        "numbers": (
            lambda: numbers_of(FULL.to_padded(multiple=4, at_least=4).append(torch.tensor([7, 8]))),
            [[0, 1, 2, 7], [0, 8]],
        )
    }
)


# Functions of a plain tensor and rows that take the plain tensor as it is.
BESIDE = {
    "cat": lambda p, x: torch.cat([p, x], 2),
    "cat, and more after it": lambda p, x: torch.cat([p * 2, x, p, x], -1),
    "stack": lambda p, x: torch.stack([x, p], 2),
    "dstack": lambda p, x: torch.dstack([p, x]),
}


# Eager mode runs each by itself; a compiled function has all of them.
RUN_AT_ONCE = [*(([name], eager) for name in BESIDE), *(([*BESIDE], way) for way in WAYS[1:])]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("names", "way"), RUN_AT_ONCE)
@pytest.mark.parametrize("grad", [False, True])
@layouts
def test_the_gradient_of_a_plain_tensor_is_plain(layout, grad, names, way):
    """The entries of it that do not exist have a gradient of 0."""
    batch = make(layout)
    p, table = (torch.ones(batch.x.shape).cumsum(2).requires_grad_() for _ in range(2))
    x, exists = batch.x.detach(), batch.x.mask().unsqueeze(-1)
    total = way(lambda p, x: sum(BESIDE[name](p, x).square().sum() for name in names))
    total(p, x.clone().requires_grad_(grad)).backward()
    for dense in (BESIDE[name](table, x.to_dense()).square() for name in names):
        dense.mul(exists.unsqueeze(-1) if dense.dim() == 4 else exists).sum().backward()
    assert type(p.grad) is torch.Tensor
    torch.testing.assert_close(p.grad, table.grad)


# ==== repeated and cut ==============================================================================================

LENGTHS = [3, 0, 5, 2]
REPEATS = torch.tensor([2, 1, 0, 3])

Rows = list[Tensor]

# The op, and what a loop over the rows gives.
CASES: dict[str, tuple[Callable[[Any], Any], Callable[[Rows], Rows]]] = {
    "each row twice": (
        lambda x: x.repeat_interleave(2, 0),
        lambda rows: [row for row in rows for _ in range(2)],
    ),
    "rows by a tensor": (
        lambda x: x.repeat_interleave(REPEATS, 0),
        lambda rows: [row for row, n in zip(rows, REPEATS.tolist(), strict=True) for _ in range(n)],
    ),
    "rows by a number in a tensor": (
        lambda x: torch.repeat_interleave(x, torch.tensor([2]), dim=0),
        lambda rows: [row for row in rows for _ in range(2)],
    ),
    "entries": (
        lambda x: x.repeat_interleave(2, 1),
        lambda rows: [row.repeat_interleave(2, 0) for row in rows],
    ),
    "features by a tensor": (
        lambda x: x.repeat_interleave(torch.tensor([1, 0, 2]), -1),
        lambda rows: [row.repeat_interleave(torch.tensor([1, 0, 2]), -1) for row in rows],
    ),
    "repeat": (lambda x: x.repeat(2, 1, 2), lambda rows: [row.repeat(1, 2) for row in rows + rows]),
    "repeat entries": (lambda x: x.repeat(1, 3, 1), lambda rows: [row.repeat(3, 1) for row in rows]),
    "tile": (lambda x: torch.tile(x, (2, 1)), lambda rows: [row.tile(2, 1) for row in rows]),
    "flip": (lambda x: x.flip(0), lambda rows: rows[::-1]),
    "flip both": (lambda x: x.flip(0, 1), lambda rows: [row.flip(0) for row in rows[::-1]]),
    "roll": (lambda x: x.roll(1, 0), lambda rows: rows[-1:] + rows[:-1]),
    "roll backwards": (
        lambda x: x.roll((-1, 1), (0, 1)),
        lambda rows: [r.roll(1, 0) for r in rows[1:] + rows[:1]],
    ),
    "every other entry": (lambda x: x[:, ::2], lambda rows: [row[::2] for row in rows]),
    "a step from 1": (lambda x: x[:, 1::3], lambda rows: [row[1::3] for row in rows]),
    "a step up to the end": (lambda x: x[:, :-1:2], lambda rows: [row[:-1:2] for row in rows]),
    "a step from the end": (lambda x: x[:, -4::2], lambda rows: [row[-4::2] for row in rows]),
    "windows": (
        lambda x: x.unfold(1, 2, 2),
        lambda rows: [row.unfold(0, 2, 2) if len(row) > 1 else row.new_zeros(0, 3, 2) for row in rows],
    ),
    "windows of features": (lambda x: x.unfold(2, 2, 1), lambda rows: [row.unfold(1, 2, 1) for row in rows]),
}


REPEATING = [*pairs_of(LAYOUTS, [eager, desugared]), ("back to back", stock)]
test_joined = judged_by_rows(OF_BATCHES, pairs_of(LAYOUTS, [eager, desugared]), sweep=2)
test_as_a_loop_over_the_rows = judged_by_rows(CASES, REPEATING, sweep=4, lengths=LENGTHS, entry=(3,))

test_without_a_meaning = refused(
    {
        "no dim": (lambda x: x.repeat_interleave(2), DispatchError, r"repeat_interleave: without dim="),
        "repeats of places": (
            lambda x: x.repeat_interleave(REPEATS, 1),
            DispatchError,
            r"repeat_interleave: expected an int of repeats",
        ),
        "windows of rows": (lambda x: x.unfold(0, 2, 1), DispatchError, r"unfold: "),
        "a dimension too few": (
            lambda x: x.repeat(2, 1),
            DispatchError,
            r"repeat: expected a number for each dimension",
        ),
        "backwards": (lambda x: x[:, ::-1], DispatchError, r"indexing .*positive step"),
    },
    ["back to back", "padded"],
)


# ---- ops on lists ----------------------------------------------------------------------------------------------


LISTS: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: torch._foreach_add([x, x], 1),
    "add, of two lists": lambda x: torch._foreach_add([x, x], [x, 2 * x], alpha=3),
    "mul, by numbers": lambda x: torch._foreach_mul([x, x], [2.0, 3.0]),
    "mul, by a tensor": lambda x: torch._foreach_mul([x, x], torch.tensor(2.0)),
    "exp": lambda x: torch._foreach_exp([x, x]),
    "pow": lambda x: torch._foreach_pow(2.0, [x, x]),
    "lerp": lambda x: torch._foreach_lerp([x], [x * x], 0.25),
    "addcmul": lambda x: torch._foreach_addcmul([x, x], [x, x], [x, x], [0.5, 2.0]),
    "addcdiv": lambda x: torch._foreach_addcdiv([x], [x], [x * x + 1], [3.0]),
    "clamp_max": lambda x: torch._foreach_clamp_max([x], 0.5),
    "norm": lambda x: torch._foreach_norm([x, 2 * x], 1),
    "beside a plain tensor": lambda x: torch._foreach_add([x, torch.ones(2, dtype=torch.float64)], 1),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("way", [eager, desugared, stock])
@pytest.mark.parametrize("name", LISTS)
def test_lists(name, way):
    batch = make_batch()
    found, expected = way(LISTS[name])(batch.x), LISTS[name](batch.leaf)
    assert type(found) is type(expected)
    check_parts(batch, [t.unwrap("values") if isinstance(t, JaggedTensor) else t for t in found], expected)


def test_lists_in_place():
    x = make_batch().x.detach()
    given = [x.clone(), x.clone()]
    assert torch._foreach_add_(given, [x, x]) is given
    torch._foreach_maximum_(given, 0.5)
    torch.testing.assert_close([t.values for t in given], [(x.values * 2).clamp(min=0.5)] * 2)
    torch._foreach_copy_(given, [x, 3 * x])
    torch._foreach_zero_(given[:1])
    torch.testing.assert_close([t.values for t in given], [x.values * 0, x.values * 3])


test_lists_of_other_rows = refused(
    {
        "other rows": (lambda x: torch._foreach_add([x], [x[:, 1:]]), ValueError, "same length"),
        "a longer list": (lambda x: torch._foreach_add([x], [x, x]), RuntimeError, "lists of one length"),
    },
    ["back to back"],
)
