"""The master weight: it computes in one dtype, and keeps and trains float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from classes import master_weight as example
from classes.master_weight import Linear, MasterWeight
from subclasses import DispatchError, strict
from subclasses.testing import suite
from tests.examples.classes.checks import refused

X = torch.linspace(-1, 1, 18).view(3, 6)


def make(rows=4, compute=torch.bfloat16):
    return MasterWeight(torch.randn(rows, 6), compute=compute)


TestMasterWeight = suite(
    make,
    ops={F.linear: lambda x: (X.bfloat16(), x)},
    sizes=[lambda n=n: make(n) for n in (5, 7)],
    variants=[lambda: make(compute=torch.float16), lambda: make(compute=torch.float64)],
    rtol=0.05,
    atol=0.05,
)
TestWide = suite(lambda: make(compute=torch.float64), ops={F.linear: lambda x: (X.double(), x)}, paths={})


@pytest.mark.sweep(2)
@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float64, torch.float32])
def test_values_and_gradients(way, compute):
    leaves = [torch.randn(size, requires_grad=True) for size in ((3, 6), (4, 6), (4,))]
    layer = way(lambda x, master, bias: F.linear(x, MasterWeight(master, compute=compute), bias).tanh())
    got, expected = layer(*leaves), F.linear(*(t.to(compute) for t in leaves)).tanh()
    torch.testing.assert_close(got, expected)
    gradients = [torch.autograd.grad(y.square().sum(), leaves) for y in (got, expected)]
    assert all(g.dtype == torch.float32 for g in gradients[0])
    torch.testing.assert_close(*gradients)


def test_a_conversion_keeps_the_master():
    master = torch.randn(4, 6, requires_grad=True)
    w = MasterWeight(master)
    wide = w.half().double()
    assert isinstance(wide, MasterWeight) and wide.dtype == wide.compute == torch.float64
    assert torch.equal(wide.master, master)
    torch.testing.assert_close(*torch.autograd.grad(F.linear(X, wide).sum(), master), X.sum(0).expand(4, 6))
    assert w.int().dtype == torch.int32 and not isinstance(w.int(), MasterWeight)


def test_a_module_is_converted_without_a_loss():
    layer = nn.Linear(6, 4)
    weight = layer.weight.detach().clone()
    layer.weight = nn.Parameter(MasterWeight(weight, compute=torch.float32), requires_grad=False)
    layer = layer.bfloat16()
    assert layer(X).dtype == torch.bfloat16
    torch.testing.assert_close(layer.float()(X), F.linear(X, weight, layer.bias))


def test_a_step_that_bfloat16_would_lose(way):
    layer = Linear(torch.ones(4, 6), torch.bfloat16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4)
    way(layer)(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(layer.master.detach(), torch.full((4, 6), 1 - 1e-4), rtol=0, atol=1e-7)
    assert torch.equal(layer.master.bfloat16(), torch.ones(4, 6).bfloat16())


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_a_layer_does_not_fall_back(way, rows):
    with strict():
        got = way(lambda x, w: F.linear(x, w))(X, make(rows))
    assert got.dtype == torch.bfloat16 and got.shape == (3, rows)


test_what_is_refused = refused(
    [make],
    {
        "another dtype": (
            ValueError,
            r"expected dtype torch\.float32",
            [lambda w: MasterWeight(w.master.half())],
        ),
        "writes": (
            DispatchError,
            None,
            [lambda w: w.mul_(2), lambda w: w.__isub__(w), lambda w: w.copy_(torch.zeros(4, 6))],
        ),
    },
)


def test_the_script(capsys):
    example.main()
    master, narrow = capsys.readouterr().out.splitlines()
    assert "float32 master  torch.float32" in master and "bfloat16 weight torch.bfloat16" in narrow
    assert float(master.split()[-1]) < float(narrow.split()[-1])
