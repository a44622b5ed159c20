"""Results as they are built: sizes, strides and order."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import desugar
from desugar.codegen.runtime import restride
from desugar.ir.fx_utils import output_nodes
from tests.desugar.classes import (
    Pair,
    make,
)

STRIDES = [((2, 3), (3, 1)), ((2, 3), (1, 2)), ((1, 3), (7, 1)), ((0, 3), (3, 1)), ((2, 0), (1, 1)), ((), ())]


@pytest.mark.parametrize(("size", "stride"), STRIDES)
def test_sizes_and_strides_of_results(size, stride):
    x = Pair(torch.empty_strided(size, stride), torch.empty_strided(size, stride))
    y = desugar.compile(lambda x: x.detach(), backend="eager")(x)
    assert (y.size(), y.stride()) == (size, stride)
    assert y.is_contiguous() == y.a.is_contiguous()


def test_the_order_of_results_is_the_functions_own():
    compiled = desugar.compile(lambda x: {"b": x * 2, "a": (x, x.sin())}, backend="eager")
    for _ in range(2):
        y = compiled(x := make(Pair, 3))
        assert list(y) == ["b", "a"] and y["a"][0] is x and isinstance(y["a"][1], Tensor)
    assert len(output_nodes(compiled.programs[0].forward)) == 4


# ---- memory order --------------------------------------------------------------------------------------------


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
