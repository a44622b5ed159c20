"""The scaled float8 tensor: the kit finds nothing, products are those of the wide numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import float8 as example
from float8 import Float8
from subclasses.testing import suite
from tests.examples.command import report_of

aten = torch.ops.aten
W = torch.linspace(-1, 1, 18).view(3, 6)

TestFloat8 = suite(
    example.make,
    ops={
        aten.mm: lambda x: (x, x.t()),
        aten.addmm: lambda x: (W[:, :4], W, x.t()),
        F.linear: lambda x: (W, x, W[0, :4]),
        aten.permute: lambda x: (x, [1, 0]),
    },
    sizes=[lambda n=n: Float8.from_float(torch.randn(n, 6)) for n in (5, 7)],
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("w", [torch.randn(0, 4), torch.randn(1, 1), torch.randn(16, 32), torch.zeros(3, 3)])
def test_from_float(w, dtype):
    q = Float8.from_float(w.to(dtype))
    assert q.dtype == dtype and q.shape == w.shape and (w.any() or not q.materialize().any())
    torch.testing.assert_close(
        q.materialize(), w.to(dtype), rtol=0.07, atol=0.02
    )  # three bits behind the point


def test_products_are_those_of_the_wide_numbers():
    x, y = Float8.from_float(torch.randn(16, 32)), Float8.from_float(torch.randn(48, 32))
    wide = x.materialize() @ y.materialize().t()
    torch.testing.assert_close(x @ y.t(), wide)
    torch.testing.assert_close(F.linear(x, y, torch.ones(48)), wide + 1)


def test_what_goes_to_the_hardware(monkeypatch):
    x, y = Float8.from_float(torch.randn(16, 32)), Float8.from_float(torch.randn(48, 32))
    assert not example.fits_scaled_mm(x, y.t())
    monkeypatch.setattr(example, "has_scaled_mm", lambda device: True)
    assert example.fits_scaled_mm(x, y.t())
    assert not example.fits_scaled_mm(x, Float8(y.qdata.t().contiguous(), y.scale))
    assert not example.fits_scaled_mm(x, y.materialize().t())
    assert not example.fits_scaled_mm(x[:3], y.t())


@pytest.mark.gpu
def test_on_the_hardware():
    if not example.has_scaled_mm("cuda"):
        pytest.skip("needs compute capability 8.9")
    x, y = (Float8.from_float(torch.randn(n, 32, device="cuda", dtype=torch.bfloat16)) for n in (16, 48))
    assert example.fits_scaled_mm(x, y.t())
    wide = x.materialize() @ y.materialize().t()
    torch.testing.assert_close(x @ y.t(), wide, rtol=0.02, atol=0.1)


def test_a_bias_trains_through_the_layer():
    layer, x = example.Float8Linear(nn.Linear(32, 16)), torch.randn(8, 32, requires_grad=True)
    optimizer, before = torch.optim.SGD(layer.parameters(), lr=0.1), layer(x).square().mean()
    before.backward()
    optimizer.step()
    assert layer(x).square().mean() < before and x.grad.abs().sum() > 0


@pytest.mark.slow
def test_the_report(capsys, monkeypatch):
    out = report_of(example, monkeypatch, capsys)
    assert "weight: 8192 bytes, in float8 2052" in out
    assert "breaks none" in out
