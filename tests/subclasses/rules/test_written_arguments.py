"""Rules for functions that write to an argument: by a method, an operator, `inplace=True` or `out=`."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses import DispatchError, SpecError, inner
from tests.subclasses.subjects import MODES, declare

DOORS = {name: MODES[name] for name in ("eager", "desugar")}
first = (torch.tensor([0]),)
WRITES = {
    "x.mul_(y)": (Tensor.mul_, lambda z: z.mul_(3)),
    "x[i] = y": (Tensor.__setitem__, lambda z: z.__setitem__(0, 0.0)),
    "x &= y": (Tensor.__iand__, lambda z: z.__iand__(3)),
    "x **= y": (Tensor.__ipow__, lambda z: z.__ipow__(3)),
    "x <<= y": (Tensor.__ilshift__, lambda z: z.__ilshift__(1)),
    "torch.relu_": (torch.relu_, torch.relu_),
    "F.hardtanh_": (F.hardtanh_, F.hardtanh_),
    "torch.index_put_": (torch.index_put_, lambda z: torch.index_put_(z, first, torch.tensor(0.0))),
    "inplace=True": (F.relu, lambda z: F.relu(z, inplace=True)),
    "inplace by position": (F.elu, lambda z: F.elu(z, 1.0, True)),
    "out=": (torch.add, lambda z: torch.add(z, 1, out=z)),
}


def halving(func, x, *args, **kwargs):
    x.held.mul_(0.5)
    return x


def five_times(func, x, *args, **kwargs):
    return type(x)(x.held * 5)


def ruled(key, rule):
    product = lambda func, x, y: type(x)(func(x.held, y))  # noqa: E731
    return declare(name="Ruled", rules={torch.ops.aten.mul: product, key: rule})


@pytest.mark.sweep(6)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", WRITES)
def test_a_write_that_autograd_does_not_see_is_an_error(name, door):
    key, call = WRITES[name]
    Ruled = ruled(key, halving)

    def f(x):
        z = x * 1.0
        call(z)
        return z

    with pytest.raises(Exception, match=r"the rule halving .* where autograd does not see it"):
        DOORS[door](f)(Ruled(torch.ones(2, requires_grad=True)))
    assert DOORS[door](f)(Ruled(torch.ones(2))).held.tolist() == [0.5, 0.5]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", [name for name in WRITES if name != "x[i] = y"])
def test_a_write_that_would_be_lost_is_an_error(name, door):
    key, call = WRITES[name]
    x = ruled(key, five_times)(torch.ones(2))
    words = r"returned a value with memory of its own, in place of the Ruled to write to"
    with pytest.raises(Exception, match=words):
        DOORS[door](lambda x: call(x))(x)
    assert x.held.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "advice"),
    {
        "x.mul_(y)": "torch.ops.aten.mul_)",
        "x **= y": "torch.ops.aten.pow_)",
        "x &= y": "as torch.bitwise_and does",
        "x[i] = y": "torch.ops.aten.copy_), and select, slice",
        "inplace=True": "torch.ops.aten.relu_)",
        "out=": "as torch.add does",
    }.items(),
)
def test_what_is_advised_instead(name, advice):
    key, call = WRITES[name]
    with pytest.raises(DispatchError) as caught:
        call(ruled(key, halving)(torch.ones(2, requires_grad=True) * 1))
    assert advice in str(caught.value)


def test_a_function_that_is_not_asked_to_write_may_return_a_new_value():
    x = ruled(F.relu, five_times)(torch.ones(2, requires_grad=True))
    assert F.relu(x).held.tolist() == F.relu(x, inplace=False).held.tolist() == [5.0, 5.0]


def test_operators_of_bits_on_numbers():
    """Their ops have no derivative, so the advice is a rule for the function."""
    Held = declare(name="Held", held=inner(differentiable=True))
    x = Held(torch.rand(2, requires_grad=True))
    for operation, words in (
        (torch.ops.aten.bitwise_and, r"@Held\.implements\(torch\.bitwise_and\): the op has no derivative"),
        (operator.iand, r"write x = torch\.bitwise_and\(x, \.\.\.\), with a rule for that function"),
    ):
        with pytest.raises(DispatchError, match=words):
            operation(x, x)
    Held.implements(torch.bitwise_and)(lambda func, a, b: Held(torch.minimum(a.held, b.held)))
    Held.implements(torch.bitwise_not)(lambda func, a: Held(1 - a.held))
    for found in (~x, torch.bitwise_not(x), x.bitwise_not()):
        torch.testing.assert_close(found.held, 1 - x.held)
    assert ((~x) & x).held.requires_grad
    with pytest.raises(SpecError, match=r"Bits\.__invert__ .*@Bits\.implements\(torch\.bitwise_not\)"):
        declare(name="Bits", __invert__=lambda self: self)
