"""Ops on lists, and rows that are repeated, reversed, rolled, cut with a step or into windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from subclasses import DispatchError
from subclasses.ragged import JaggedTensor
from tests.subclasses.ragged.judge import (
    LAYOUTS,
    check_parts,
    desugared,
    eager,
    make,
    make_batch,
    pairs_of,
    refused,
    stock,
)

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


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("layout", "way"), [*pairs_of(LAYOUTS, [eager, desugared]), ("back to back", stock)])
@pytest.mark.parametrize("name", CASES)
def test_as_a_loop_over_the_rows(name, layout, way):
    op, loop = CASES[name]
    batch = make(layout, LENGTHS, (3,))
    got = way(op)(batch.x)
    assert type(got) is type(batch.x)
    check_parts(batch, got, loop(batch.rows))


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
