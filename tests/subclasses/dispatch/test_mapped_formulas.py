"""Derivatives of mapped ops of a class with rules: its rules are not asked by PyTorch's formulas.

An interval is a pair of numbers, on which a monotone function acts one by one. A product of intervals does not.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import subclasses
from subclasses import TensorSubclass, inner
from tests.doors import DOORS
from tests.subclasses.autograd.judge import agree, numbers
from tests.subclasses.subjects import declare

aten = torch.ops.aten


def product(func, x, y):
    a, b = (x.low, x.high) if isinstance(x, Interval) else (x, x)
    c, d = (y.low, y.high) if isinstance(y, Interval) else (y, y)
    products = torch.stack(torch.broadcast_tensors(a * c, a * d, b * c, b * d))
    return Interval(products.amin(0), products.amax(0))


def comparison(func, x, y):
    """Whether it is certain."""
    if not isinstance(y, Interval):
        return func(x.low, y) & func(x.high, y)
    return func(x.high, y.low) if func in (torch.lt, torch.le) else func(x.low, y.high)


ENDS = {"low": inner(), "high": inner()}
Interval = declare(
    keywords={"fallback": "map"}, rules={aten.mul: product, subclasses.comparisons: comparison}, **ENDS
)
# Has no rule for an op of a vector space.
Compared = declare(keywords={"fallback": "map"}, rules={subclasses.comparisons: comparison}, **ENDS)


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
LOW = torch.tensor([-3.0, -2.0, 0.5, 0.2], dtype=torch.float64)
HIGH = LOW + torch.tensor([2.5, 3.0, 1.5, 0.1], dtype=torch.float64)


@pytest.mark.sweep(24)
@pytest.mark.parametrize("cls", [Interval, Compared])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("door", DOORS)
def test_gradients_are_those_of_each_inner_tensor(door, case, cls):
    fn = CASES[case]
    compiled = DOORS[door](lambda x: fn(x).unwrap())
    agree(lambda low, high: compiled(cls(low, high)), lambda low, high: (fn(low), fn(high)), [LOW, HIGH])


Cubed, Boxed = declare(keywords={"fallback": "map"}), declare(keywords={"fallback": "map"})


def innermost(x):
    return innermost(x.unwrap("held")) if isinstance(x, TensorSubclass) else x


@pytest.mark.parametrize("door", ["eager", "inside", "desugar"])
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

    compiled = DOORS[door](run)
    agree(
        lambda a, b, v, w: compiled(Interval(a, b), Interval(v, w)).unwrap(),
        lambda a, b, v, w: (run(a, v), run(b, w)),
        numbers(*((2, 3, 4, 8),) * 2, *((8, 4, 8),) * 2),
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize(
    "fn", [lambda x: x.double(), lambda x: x.double() * 2, lambda x: (x * 2).bfloat16(), lambda x: x.half()]
)
def test_a_change_of_dtype_beside_integers_and_a_rule(fn, dtype):
    """The backward converts the cotangent, in which integers stay what they are."""
    Known = declare(
        keywords={"fallback": "map"},
        held=inner(),
        known=inner(dtype=dtype),
        rules={aten.mul: lambda func, x, y: Known(func(x.held, y), x.known.clone())},
    )

    def changed(t):
        y = fn(Known(t, torch.ones(3, dtype=dtype)))
        assert y.known.dtype == dtype
        return y.unwrap("held")

    agree(changed, fn, [torch.ones(3)])
