"""Results as optree sees them."""

from __future__ import annotations

from collections import namedtuple

import optree
import pytest
import torch

from desugar.trees import flatten_result, result_leaves

Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "result",
    [
        3,
        None,
        (1, [2, {"a": 3}]),
        Point(1, 2),
        torch.Size([2, 3]),
        {"s": (torch.Size([]), 4)},
        torch.ones(2).max(0),
    ],
    ids=str,
)
def test_round_trip(result):
    leaves, spec = flatten_result(result)
    again = spec.unflatten(leaves)
    assert type(again) is type(result) and str(again) == str(result)
    assert all(a is b for a, b in zip(result_leaves(result), leaves, strict=True))


def test_a_size_is_taken_apart_here_and_nowhere_else():
    assert result_leaves((torch.Size([2, 3]), None)) == [2, 3, None]
    assert optree.tree_leaves(torch.Size([2, 3])) == [torch.Size([2, 3])]
