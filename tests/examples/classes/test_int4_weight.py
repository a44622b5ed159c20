"""The four-bit weight: products are those of the unpacked matrix, scales train."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from classes.int4_weight import Int4Weight
from subclasses import strict
from subclasses.testing import check, suite
from tests.examples.classes.checks import check_gradients, check_refused, check_unchanged

X = torch.linspace(-1, 1, 24).view(3, 8)


def make(rows=4, group=4):
    return Int4Weight.from_float(torch.randn(rows, 8), group)


TestInt4Weight = suite(
    make,
    ops={F.linear: lambda x: (X, x)},
    sizes=[lambda n=n: make(n) for n in (5, 7)],
    variants=[lambda: make(group=2), lambda: make(group=8)],
)


def test_every_number_is_kept():
    numbers = torch.arange(-7, 8).tile(2)[:28].view(2, 14)
    numbers[:, 0] = 7
    w = Int4Weight.from_float(numbers.double() * 0.5, 14)
    assert w.packed.shape == (2, 7) and w.scale.tolist() == [[0.5], [0.5]]
    assert torch.equal(w.materialize(), numbers * 0.5)
    smallest = Int4Weight(torch.tensor([[0x0F]], dtype=torch.uint8), torch.ones(1, 1), group=2)
    assert smallest.materialize().tolist() == [[7, -8]]


def test_values_and_gradients(way):
    w = make()
    leaves = [t.requires_grad_() for t in (torch.randn(3, 8), w.scale.clone(), torch.randn(4))]

    def layer(x, scale, bias):
        return F.linear(x, Int4Weight(w.packed, scale, group=4), bias).tanh()

    numbers, (x, scale, bias) = w.materialize() / w.scale.repeat_interleave(4, 1), leaves
    expected = F.linear(x, numbers * scale.repeat_interleave(4, 1), bias).tanh()
    got = way(layer)(*leaves)
    check_gradients(got, expected, leaves)


def test_a_compiled_weight_is_an_argument(way):
    x, w = torch.randn(3, 8), make()
    with strict():  # no op of the layer makes the matrix by the fallback
        got = way(lambda x, w: F.linear(x, w).relu())(x, w)
    torch.testing.assert_close(got, F.linear(x, w.materialize()).relu())


def test_a_module_loads_saves_and_trains_its_bias(tmp_path):
    layer = nn.Linear(8, 4)
    layer.weight = nn.Parameter(make(), requires_grad=False)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    other = nn.Linear(8, 4)
    other.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True), assign=True)
    x = torch.randn(2, 8)
    torch.testing.assert_close(other(x), layer(x))
    layer(x).sum().backward()
    torch.testing.assert_close(layer.bias.grad, torch.full((4,), 2.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_product_has_the_dtype_of_its_input(dtype):
    w = make()
    assert F.linear(X.to(dtype), w).dtype == dtype
    converted = w.to(dtype)
    assert converted.dtype == converted.materialize().dtype == dtype
    assert torch.equal(converted.packed, w.packed)
    torch.testing.assert_close(converted.materialize(), w.materialize().to(dtype), rtol=2e-2, atol=1e-3)


@pytest.mark.slow
def test_bfloat16():
    check(lambda: make().bfloat16(), paths={}, rtol=0.05, atol=0.05)


def test_no_rows_zeros_and_one_group():
    empty = Int4Weight.from_float(torch.zeros(0, 8), 4)
    assert F.linear(X, empty).shape == (3, 0)
    assert not Int4Weight.from_float(torch.zeros(2, 8), 8).materialize().any()
    assert Int4Weight.from_float(torch.zeros(2, 0), 4).materialize().shape == (2, 0)


def test_what_is_refused():
    group = "an even group that divides the row"
    check_refused(lambda: make(group=3), lambda: make(group=16), error=ValueError, match=group)
    words = r"scales of size \[4, 3\] for groups of 4 in 4 x 8"
    check_refused(lambda: Int4Weight(make().packed, torch.ones(4, 3), group=4), error=ValueError, match=words)
    w = make()
    writes = lambda: w.mul_(2), lambda: w.__isub__(1), lambda: w.copy_(torch.zeros(4, 8))
    check_unchanged([w.packed, w.scale], *writes)
