"""Batches by key, what a loop over their rows gives, and the ways to compile."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

import desugar
from subclasses.keyed import KeyedJaggedTensor

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
    "eager": lambda f: f,
    "desugar.compile": lambda f: desugar.compile(f, backend="eager"),
    "behind Dynamo": lambda f: torch.compile(
        f, backend="desugar", options={"backend": "eager"}, fullgraph=True
    ),
    "stock": lambda f: torch.compile(f, backend="aot_eager", fullgraph=True),
}


def batch(lengths, keys=("a", "b"), weighted=False):
    """Random ids of these lengths; weights require grad."""
    total = sum(lengths)
    torch.manual_seed(total)
    weights = torch.rand(total, requires_grad=True) if weighted else None
    sizes = torch.tensor(lengths, dtype=torch.int64)
    return KeyedJaggedTensor(list(keys), torch.randint(0, IDS, (total,)), sizes, weights=weights)


def rows_of(x: KeyedJaggedTensor, entries: Tensor) -> dict[str, list[Tensor]]:
    """What there is for the entries of each row, by key."""
    return {
        key: [entries[a:b] for a, b in pairwise(row)]
        for key, row in zip(x.keys, x.offsets.tolist(), strict=True)
    }
