"""Products of sizes in a graph have two factors each, as Inductor takes them."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F

import desugar
from subclasses.ragged import JaggedTensor


def attend(q, bias):
    return F.scaled_dot_product_attention(q, q * 2, q, attn_mask=bias)


@pytest.mark.parametrize("width", [16, 8])
def test_a_size_that_occurs_twice_in_a_stride(width):
    """The longest row, the mask and the heads have one size: a stride is the square of the symbol, or times others."""
    rows = [torch.randn(n, 2, width) for n in (width, 5, 6)]
    q = JaggedTensor.from_tensors(rows).transpose(1, 2).requires_grad_()
    bias, products = torch.randn(width, width), []

    def backend(graph, inputs):
        products.extend(
            node for node in graph.graph.nodes if node.op == "call_function" and "val" in node.meta
        )
        return graph.forward

    out = desugar.compile(attend, backend=backend, dynamic=True)(q, bias)
    torch.testing.assert_close(out.values, attend(q, bias).values)
    out.values.sum().backward()
    numbers = [node for node in products if isinstance(node.meta["val"], torch.SymInt)]
    multiplied = [node for node in numbers if node.target is operator.mul]
    assert multiplied and all(len(node.args) == 2 for node in multiplied)
    assert {getattr(node.target, "__module__", None) for node in numbers} <= {
        "_operator",
        "torch._ops",
        "torch",
    }
