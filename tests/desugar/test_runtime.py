"""What wrappers call when something is out of the ordinary."""

from __future__ import annotations

import itertools

import pytest
import torch

from desugar.runtime import restride


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_restride(order):
    for make in (
        lambda: torch.randn(2, 3, 4),
        lambda: torch.randn(4, 3, 2).permute(2, 1, 0),
        lambda: torch.randn(2, 6, 4)[:, ::2],
    ):
        tensor = make()
        out = restride(tensor, order)
        assert torch.equal(out, tensor) and out.permute(order).is_contiguous()
        assert (out is tensor) == tensor.permute(order).is_contiguous(), "copied only where it is not"


def test_restride_of_no_dimension():
    x = torch.tensor(1.0)
    assert restride(x, ()) is x
