"""What wrappers call when something is out of the ordinary."""

from __future__ import annotations

import itertools

import pytest
import torch

from desugar.codegen.runtime import note_versions, raise_versions, restride


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


def test_counters_that_are_shared_rise_together():
    x = torch.ones(4)
    view, detached, other = x[1:], x.detach()[2:], torch.ones(4)
    tensors = (x, view, detached, other)
    before = note_versions(tensors)
    x.add_(1)  # the write itself may count differently
    raise_versions(tensors, before, (2, 1, 0, 0))
    assert note_versions(tensors) == (3, 3, 3, 0)


def test_inference_tensors_have_no_counter():
    with torch.inference_mode():
        x = torch.ones(2)
    y = torch.ones(2)
    assert note_versions((x, y)) == (None, 0)
    raise_versions((x, y), (None, 0), (1, 1))
    assert y._version == 1
