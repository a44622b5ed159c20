"""Derivatives of mapped ops of a class with rules: its rules are not asked by PyTorch's formulas.

An interval is a pair of numbers, on which a monotone function acts one by one. A product of intervals does not.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import desugar
import subclasses
from subclasses import TensorSubclass, inner

aten = torch.ops.aten


class Interval(TensorSubclass, fallback="map"):
    low: Tensor = inner()
    high: Tensor = inner()


@Interval.implements(aten.mul)
def _(func, x, y):
    a, b = (x.low, x.high) if isinstance(x, Interval) else (x, x)
    c, d = (y.low, y.high) if isinstance(y, Interval) else (y, y)
    products = torch.stack(torch.broadcast_tensors(a * c, a * d, b * c, b * d))
    return Interval(products.amin(0), products.amax(0))


@Interval.implements(subclasses.comparisons)
def _(func, x, y):
    """Whether it is certain."""
    if not isinstance(y, Interval):
        return func(x.low, y) & func(x.high, y)
    return func(x.high, y.low) if func in (torch.lt, torch.le) else func(x.low, y.high)


class Compared(TensorSubclass, fallback="map"):
    """Has no rule for an op of a vector space."""

    low: Tensor = inner()
    high: Tensor = inner()


@Compared.implements(subclasses.comparisons)
def _(func, x, y):
    return func(x.low, y) & func(x.high, y)


DOORS = {
    "eager": lambda f: f,
    "stock": lambda f: torch.compile(f, backend="aot_eager"),
    "torch.compile": lambda f: torch.compile(f, backend="desugar", options={"backend": "eager"}),
    "desugar": lambda f: desugar.compile(f, backend="eager"),
}


def through_a_view(x):
    y = x + 0
    y[:2].atan_()
    return y


CASES = {
    "pow": lambda x: x.pow(3),
    "atan": torch.atan,
    "erf": torch.erf,
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp by a tensor": lambda x: torch.clamp(x, torch.tensor(-1.0, dtype=torch.float64)),
    "prod": lambda x: x.prod(0),
    "hardtanh": F.hardtanh,
    "tanh in place": lambda x: (x + 0).tanh_(),
    "pow in place": lambda x: (x + 0).pow_(3),
    "clamp in place": lambda x: (x + 0).clamp_(-1, 1),
    "through a view": through_a_view,
    "twice": lambda x: x.atan().clamp(-1, 1).pow(3),
}


def ends():
    low = torch.tensor([-3.0, -2.0, 0.5, 0.2], dtype=torch.float64)
    return low, low + torch.tensor([2.5, 3.0, 1.5, 0.1], dtype=torch.float64)


@pytest.mark.sweep(24)
@pytest.mark.parametrize("cls", [Interval, Compared])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("door", DOORS)
def test_gradients_are_those_of_each_inner_tensor(door, case, cls):
    function, leaves = CASES[case], [t.requires_grad_() for t in ends()]
    compiled = DOORS[door](lambda x: function(x).unwrap())
    weights = torch.linspace(0.5, 2, 4, dtype=torch.float64)
    for _ in range(2):
        found, expected = compiled(cls(*leaves)), [function(t) for t in leaves]
        torch.testing.assert_close(list(found), expected)
        gradients = [
            torch.autograd.grad(sum((t.sin() * weights[: t.numel()]).sum() for t in ts), leaves)
            for ts in (found, expected)
        ]
        torch.testing.assert_close(*gradients)


class Cubed(TensorSubclass, fallback="map"):
    a: Tensor = inner()


class Boxed(TensorSubclass, fallback="map"):
    low: Tensor = inner()


def innermost(x):
    while isinstance(x, TensorSubclass):
        (x,) = x.unwrap()
    return x


@pytest.mark.parametrize("door", ["eager", "torch.compile", "desugar"])
@pytest.mark.parametrize("nested", [False, True])
def test_the_gradient_of_a_parameter_is_differentiated_again(nested, door):
    p = Cubed(torch.tensor([3.0]))
    p = nn.Parameter(Boxed(p) if nested else p)
    y = DOORS[door](lambda w: innermost(w * w * w))(p).sum()
    (d,) = torch.autograd.grad(y, p, create_graph=True)
    (y + innermost(d).sum()).backward()
    assert innermost(p.grad).item() == 27 + 18


@pytest.mark.sweep(2)
@pytest.mark.parametrize("door", DOORS)
def test_attention_and_other_ops_of_several_operands(door):
    """PyTorch's formula for attention leaves it to its kernel to see that a gradient is absent."""

    def run(x, w):
        x = F.layer_norm(x, x.shape[-1:], w[0, 0])
        return F.conv1d(F.scaled_dot_product_attention(x, x + 1, x, is_causal=True).flatten(0, 1), w)

    inners = [torch.randn(2, 3, 4, 8, requires_grad=True) for _ in range(2)]
    weights = [torch.randn(8, 4, 8, requires_grad=True) for _ in range(2)]
    leaves = [*inners, *weights]
    out = DOORS[door](run)(Interval(*inners), Interval(*weights))
    got = torch.autograd.grad(out.unwrap("low").square().sum() + out.unwrap("high").sum(), leaves)
    low, high = (run(x, w) for x, w in zip(inners, weights, strict=True))
    expected = torch.autograd.grad(low.square().sum() + high.sum(), leaves)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize(
    "fn", [lambda x: x.double(), lambda x: x.double() * 2, lambda x: (x * 2).bfloat16(), lambda x: x.half()]
)
def test_a_change_of_dtype_beside_integers_and_a_rule(fn, dtype):
    """The backward converts the cotangent, in which integers stay what they are."""

    class Known(TensorSubclass, fallback="map"):
        held: Tensor = inner()
        known: Tensor = inner(dtype=dtype)

    @Known.implements(torch.ops.aten.mul)
    def _(func, x, y):
        return Known(func(x.held, y), x.known.clone())

    t = torch.ones(3, requires_grad=True)
    y = fn(Known(t, torch.ones(3, dtype=dtype)))
    (got,) = torch.autograd.grad(y.unwrap("held").sum(), t)
    (expected,) = torch.autograd.grad(fn(t).sum(), t)
    assert torch.equal(got, expected) and y.known.dtype == dtype
