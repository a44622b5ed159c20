"""Subclasses that the function itself builds, around tensors from outside."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subclasses import TensorSubclass, inner
from subclasses.ragged import JaggedTensor
from tests.desugar.classes import TwoTensor
from tests.desugar.judge import by_dynamo, by_pass


class Scaled(TensorSubclass, size_from="data8", dtype_from="scale", fallback="materialize"):
    data8: Tensor = inner(dtype=torch.int8)
    scale: Tensor = inner()

    def materialize(self) -> Tensor:
        return self.data8.to(self.scale.dtype) * self.scale


@Scaled.implements(F.linear)
def _(func, x, w, bias=None):
    y = func(x, w.data8.to(x.dtype)) * w.unwrap("scale").squeeze(-1)
    return y if bias is None else y + bias


class Quantized(nn.Module):
    """Keeps the parts, and builds the subclass in its forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("data8", torch.randint(-5, 5, (3, 4), dtype=torch.int8))
        self.scale = nn.Parameter(torch.rand(3, 1))

    def forward(self, x):
        return F.linear(x, Scaled(self.data8, self.scale))


WAYS = pytest.mark.parametrize("way", [by_pass, by_dynamo])


@WAYS
def test_a_module_that_builds_its_weight(way):
    module, x = Quantized(), torch.randn(2, 4)
    compiled = way(module)
    for step in range(5):
        expected, found = module(x), compiled(x)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), module.scale) for y in (expected, found)))
        assert way is not by_pass or len(compiled.programs) == 1
        with torch.no_grad():
            module.scale.mul_(0.5)  # an optimizer's step is seen
        if step == 3:
            module.scale = nn.Parameter(torch.rand(3, 1))


values, offsets = torch.randn(5, 3, requires_grad=True), torch.tensor([0, 2, 5])
outside = torch.randn(3)

BUILT = {
    "declared": lambda x: F.linear(x, Scaled(torch.ones(3, 3, dtype=torch.int8), x[:, :1])),
    "ragged, values given": lambda x: JaggedTensor(x, offsets, max_length=3).sum(1),
    "ragged, all from outside": lambda x: (JaggedTensor(values, offsets, max_length=3) * x[0]).sum(1),
    "by hand": lambda x: (TwoTensor(outside, outside) * x).a,
    "by hand, one part given": lambda x: (TwoTensor(x, x * 2) * outside).b,
    "given back": lambda x: TwoTensor(outside, outside),
    "given back, plain": lambda x: (outside, x * 2),
}


@pytest.mark.sweep(9)
@WAYS
@pytest.mark.parametrize("name", BUILT)
def test_built_inside(way, name):
    fn = BUILT[name]
    compiled = way(fn)
    for scale in (1.0, 2.0):
        x = (torch.ones(5, 3) * scale).narrow(0, 0, 5 if "ragged" in name else 3).requires_grad_()
        expected, found = fn(x), compiled(x)
        torch.testing.assert_close(found, expected)
        first = [y[0] if isinstance(y, tuple) else y for y in (expected, found)]
        if expected_grad := first[0].requires_grad:
            wanted = [x] if "outside" not in name else [x, values]
            grads = [torch.autograd.grad(y.sum(), wanted, allow_unused=True) for y in first]
            torch.testing.assert_close(*grads)
        assert first[1].requires_grad == expected_grad


def test_a_result_from_outside_is_the_same_object():
    assert by_pass(BUILT["given back, plain"])(torch.ones(3))[0] is outside


def test_one_part_from_outside_by_hand():
    found = by_pass(lambda x: TwoTensor(x, outside) * 2)(torch.ones(3))
    assert found.b.equal(outside * 2) and found.a.tolist() == [2, 2, 2]
