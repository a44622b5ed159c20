"""Autograd notices what a rule for an op that writes did to inner tensors, and to no others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import desugar
from subclasses import TensorSubclass, inner

aten = torch.ops.aten
DOORS = {
    "eager": lambda fn: fn,
    "stock": lambda fn: torch.compile(fn, backend="aot_eager"),
    "backend": lambda fn: torch.compile(fn, backend="desugar", options={"backend": "eager"}),
    "desugar.compile": lambda fn: desugar.compile(fn, backend="eager"),
}
WRITES = {
    aten.add_.Tensor: lambda w: w.add_(torch.ones(3, 4)),
    aten.copy_.default: lambda w: w.copy_(torch.ones(3, 4)),
    aten.fill_.Scalar: lambda w: w.fill_(2.0),
    aten.zero_.default: lambda w: w.zero_(),
}


@pytest.mark.sweep(12)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("fallback", ["materialize", "map", "error"])
@pytest.mark.parametrize("op", WRITES, ids=str)
def test_a_write_by_a_rule_between_forward_and_backward_is_refused(op, fallback, door):
    class Delta(TensorSubclass, fallback=fallback):
        change: Tensor = inner()
        base: Tensor = inner()

        def materialize(self):
            return self.base + self.change

    @Delta.implements(F.linear)
    def linear(func, x, w, bias=None):
        change, base = w.unwrap()
        return func(x, base, bias) + func(x, change)

    @Delta.implements(op)
    def write(func, x, *operands, **options):
        func(x.change, *operands, **options)
        return x

    w, x = Delta(torch.ones(3, 4), torch.zeros(3, 4)), torch.ones(2, 4, requires_grad=True)
    out = DOORS[door](F.linear)(x, w).sum()
    WRITES[op](w)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("alias", [False, True])
def test_a_write_that_follows_from_a_rule_leaves_alone_what_the_rule_passes_on(alias, door):
    class Indexed(TensorSubclass):
        values: Tensor = inner()
        index: Tensor = inner(dtype=torch.int64)

    @Indexed.implements(aten.mul)
    def multiply(func, x, y):
        return Indexed(x.values * y, x.index.view_as(x.index) if alias else x.index)

    def fn(values, index):
        x = Indexed(values * 1, index)
        x.mul_(2.0)
        return (x.unwrap("values") * torch.arange(3.0)).sum()

    values, index = torch.ones(3, requires_grad=True), torch.tensor([2, 0, 1])
    (grad,) = torch.autograd.grad(DOORS[door](fn)(values, index), values)
    assert grad.tolist() == [0, 2, 4] and index._version == 0
