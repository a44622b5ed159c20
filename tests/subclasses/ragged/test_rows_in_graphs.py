"""Rows as plain tensors inside of one graph: the lengths are extents that the compiler leaves open."""

from __future__ import annotations

import pytest
import torch

from tests.doors import COMPILED
from tests.subclasses.ragged.judge import make_batch

FUNCTIONS = {
    "unbind": lambda x: list(x.unbind()),
    "of results": lambda x: [row.t() for row in (x * 2).unbind()],
    "looped": lambda x: [sum((row.softmax(0) * 2).sum() for row in x)],
    "selected": lambda x: [x[1] * 2, x[-1]],
    "lengths read": lambda x: [row.shape[0] * row.sum() for row in x.unbind()],
    "parts of a field": lambda x: [*x.unwrap("values").split([2, 4]), *x.values.chunk(3), x.values[1:3]],
}
CALLS = {
    "lengths": ("back to back", [(2, 4), (3, 5), (7, 1)]),
    "empty rows": ("back to back", [(2, 4), (0, 3), (5, 0), (0, 0)]),
    "one entry": ("back to back", [(2, 4), (0, 1), (1, 0)]),
    "no entry first": ("back to back", [(0, 0), (2, 1), (3, 4)]),
    "holes": ("holes", [(2, 4), (3, 1), (1, 0)]),
    "features first": ("ragged dim 2", [(2, 4), (3, 1), (1, 7)]),
    "six entries": ("back to back", [(2, 4)]),
}
CASES = [
    (door, case, name)
    for name in FUNCTIONS
    for door, case in [*(("desugar", case) for case in CALLS), ("stock", "lengths"), ("inside", "holes")]
    if (case == "six entries") is (name == "parts of a field")
]
CASES += [(door, "six entries", "parts of a field") for door in ("stock", "inside")]


def leaf(layout, lengths, grad=True):
    torch.manual_seed(sum(lengths))
    return make_batch(layout, lengths, (3,)).x.detach().requires_grad_(grad)


@pytest.mark.sweep(42)
@pytest.mark.parametrize(("door", "case", "name"), CASES)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_rows(door, case, name, grad):
    fn, (layout, calls) = FUNCTIONS[name], CALLS[case]
    compiled = COMPILED[door](fn, fullgraph=True, **{"strict": True} if door == "desugar" else {})
    for lengths in calls:
        x, y = (leaf(layout, lengths, grad) for _ in range(2))
        expected, got = fn(x), compiled(y)
        torch.testing.assert_close(got, expected)
        assert [t.requires_grad for t in got] == [grad] * len(expected)
        if grad:
            for leaves in (expected, got):
                sum(n * t.square().sum() for n, t in enumerate(leaves, 1)).backward()
            torch.testing.assert_close(y.grad.values, x.grad.values)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", list(FUNCTIONS)[:-1])
def test_one_program_for_all_lengths(name):
    compiled = COMPILED["desugar"](FUNCTIONS[name], fullgraph=True)
    for lengths in ((2, 4), (3, 5), (9, 2), (4, 4), (2, 8)):
        compiled(leaf("back to back", lengths))
    assert len(compiled.programs) == 1
