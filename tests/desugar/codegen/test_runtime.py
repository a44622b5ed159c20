"""What wrappers call when something is out of the ordinary."""

from __future__ import annotations

import itertools

import pytest
import torch

from desugar.codegen.runtime import restride


@pytest.mark.parametrize(
    ("tensor", "order"),
    [
        (torch.tensor(1.0), ()),
        *itertools.product(
            [torch.randn(2, 3, 4), torch.randn(4, 3, 2).permute(2, 1, 0), torch.randn(2, 6, 4)[:, ::2]],
            itertools.permutations(range(3)),
        ),
    ],
)
def test_restride(tensor, order):
    out = restride(tensor, order)
    assert torch.equal(out, tensor) and out.permute(order).is_contiguous()
    assert (out is tensor) == tensor.permute(order).is_contiguous(), "copied only where it is not"
