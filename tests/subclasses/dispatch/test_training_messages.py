"""What a graph cannot do to a Parameter of a class that materializes, as an optimizer does it: what the error says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import desugar
from tests.subclasses.subjects import LowRank

WRITES = {
    "mul_": (lambda p: p.mul_(0.5), "mul_.Tensor"),
    "_foreach_mul_": (lambda p: torch._foreach_mul_([p], 0.5), "_foreach_mul_.Scalar"),
}

DOORS = {
    "stock": lambda f, **how: torch.compile(f, backend="eager", **how),
    "desugar": lambda f, **how: desugar.compile(f, backend="eager", **how),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", WRITES)
def test_a_graph_does_not_write_to_a_parameter(name, door):
    """Without fullgraph the graph ends there, as the error advises, and the inner tensors are written to."""
    write, op = WRITES[name]
    p = nn.Parameter(LowRank(torch.ones(4, 2), torch.ones(2, 3)))

    @torch.no_grad()
    def step(p):
        write(p)

    text = (
        f"{op} writes to a Parameter of a LowRank in a compiled function, .*; compile without fullgraph=True"
    )
    with pytest.raises(Exception, match=text):  # by way of Dynamo's own
        DOORS[door](step, fullgraph=True)(p)
    torch.compiler.reset()
    DOORS[door](step)(p)
    assert p.left.eq(0.5).all() and p.right.eq(0.5).all()
