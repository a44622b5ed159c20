"""The ops themselves: PyTorch's own checks of schema, sizes and gradients."""

from __future__ import annotations

import pytest
import torch

from subclasses.keyed.kernels import NO_POOLING, Entries, Lookups, keyed_lookup, keyed_pool, parts_of

OFFSETS = torch.tensor([[4, 6, 9], [1, 1, 4]])


def arguments(mode, weighted=False, lengths=None, sparse=False):
    torch.manual_seed(0)
    tables = [torch.randn(5, d, dtype=torch.float64, requires_grad=True) for d in (2, 3)]
    weights = torch.rand(9, dtype=torch.float64, requires_grad=True) if weighted else None
    entries = Entries(torch.randint(0, 5, (9,)), OFFSETS, lengths, weights)
    return (tables, *entries, *Lookups([mode] * 2, [-1, 0], [False, False], sparse, [0, 1]))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("lengths", [None, torch.tensor([[2, 1], [0, 3]])], ids=["no gaps", "gaps"])
def test_pool_keeps_what_pytorch_asks_of_an_op(mode, lengths):
    torch.library.opcheck(keyed_pool, arguments(mode, lengths=lengths))


def test_pool_with_weights():
    torch.library.opcheck(keyed_pool, arguments(0, weighted=True))
    tables, values, *rest = arguments(0, weighted=True)

    def run(a, b, w):
        return keyed_pool([a, b], values, rest[0], None, w, *rest[3:])[0]

    assert torch.autograd.gradcheck(run, (*tables, rest[2]))


def test_lookup_keeps_what_pytorch_asks_of_an_op():
    tables = [torch.randn(5, 2, requires_grad=True) for _ in range(2)]
    values = torch.randint(0, 5, (9,))
    how = Lookups([NO_POOLING] * 2, [-1, 1], [False, True], False, [0, 1])
    torch.library.opcheck(keyed_lookup, (tables, *Entries(values, OFFSETS), *how))


def test_parts():
    first, second = parts_of(OFFSETS, None)
    assert (first.positions, second.positions) == (slice(4, 9), slice(1, 4))
    assert (first.starts.tolist(), second.starts.tolist()) == ([0, 2], [0, 0])
    first, second = parts_of(OFFSETS, torch.tensor([[1, 2], [0, 3]]))
    assert (first.positions.tolist(), second.positions.tolist()) == ([4, 6, 7], [1, 2, 3])
    assert (first.starts.tolist(), second.starts.tolist()) == ([0, 1], [0, 0])
