"""Batches by key, the results of a loop over their rows, and the ways to compile."""

from __future__ import annotations

import functools
from itertools import pairwise

import torch
from torch import Tensor

from subclasses.keyed import KeyedJaggedTensor
from tests.doors import by_desugar, by_stock, by_torch, eager

IDS = 10

# Lengths of the rows of two keys: empty rows, a key without values, other batch sizes, one row each.
LENGTHS = (
    [1, 2, 0, 3],
    [2, 2, 1, 1],
    [0, 0, 0, 0, 3, 3],
    [4, 4, 4, 4],
    [2, 1, 0, 0],
    [0, 0, 1, 1, 1, 3],
    [2, 3],
)

WAYS = {
    "eager": eager,
    "desugar.compile": by_desugar,
    "behind Dynamo": functools.partial(by_torch, fullgraph=True),
    "stock": functools.partial(by_stock, fullgraph=True),
}
COMPILED = [way for way in WAYS if way != "eager"]


def batch(lengths, keys=("a", "b"), weighted=False):
    """Random ids of these lengths; weights require grad."""
    total = sum(lengths)
    torch.manual_seed(total)
    weights = torch.rand(total, requires_grad=True) if weighted else None
    sizes = torch.tensor(lengths, dtype=torch.int64)
    return KeyedJaggedTensor(list(keys), torch.randint(0, IDS, (total,)), sizes, weights=weights)


def rows_of(x: KeyedJaggedTensor, entries: Tensor) -> dict[str, list[Tensor]]:
    """The entries of each row, by key."""
    return {
        key: [entries[a:b] for a, b in pairwise(row)]
        for key, row in zip(x.keys, x.offsets.tolist(), strict=True)
    }
