"""Views that a rule wrote to, as operands: Python ends `x[0] *= 2` with a copy of the view onto itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from subclasses import DispatchError, TensorSubclass, inner
from tests.subclasses.subjects import MODES

aten = torch.ops.aten


def ratio_class(fallback):
    """A class whose rules leave the second inner tensor as it is, or move the first one alone."""

    class Ratio(TensorSubclass, fallback=fallback):
        num: Tensor = inner(differentiable=True)
        den: Tensor = inner(differentiable=True)

    @Ratio.implements(aten.mul.Tensor)
    def _(func, x, y):
        return Ratio(x.num * y, x.den.clone())

    @Ratio.implements(aten.add.Tensor)
    def _(func, x, y, *, alpha=1):
        return Ratio(x.num + alpha * x.den * y, x.den.clone())

    return Ratio


def scaled(x, d):
    x[0] *= 2.0
    return x


def moved(x, d):
    x[0] += d
    return x


def of_a_slice(x, d):
    x[:, 1:] *= 3.0
    x[:, 1:] += d[1:]
    return x


def to_another_row(x, d):
    part = x[0]
    part *= 2.0
    x[1] = part
    return x


def to_another_value(x, d):
    part = x[0]
    part += d
    y = torch.zeros_like(x)
    y[1].copy_(part)
    return y


def of_a_view_of_a_view(x, d):
    row = x[0]
    end = row[1:]
    end *= 2.0
    row += d
    x[1] = row
    return x


def of_plain(write, num, den, d):
    """What the functions compute, of plain tensors."""
    first = torch.tensor([1.0, 0.0])[:, None]
    if write is scaled:
        return num * (1 + first), den
    if write is moved:
        return num + first * den * d, den
    if write is of_a_slice:
        end = torch.tensor([0.0, 1.0, 1.0])
        return num * (1 + 2 * end) + end * den * d, den
    if write is to_another_row:
        return torch.stack([2 * num[0], 2 * num[0]]), torch.stack([den[0], den[0]])
    if write is to_another_value:
        row, zeros = num[0] + den[0] * d, torch.zeros(3)
        return torch.stack([zeros, row]), torch.stack([zeros, den[0]])
    row = num[0] * torch.tensor([1.0, 2.0, 2.0]) + den[0] * d
    return torch.stack([row, row]), torch.stack([den[0], den[0]])


WRITES = [scaled, moved, of_a_slice, to_another_row, to_another_value, of_a_view_of_a_view]


@pytest.mark.sweep(48)
@pytest.mark.parametrize("door", MODES)
@pytest.mark.parametrize("fallback", ["views", "map"])
@pytest.mark.parametrize("write", WRITES)
def test_gradients_are_those_of_the_rules(write, fallback, door):
    Ratio = ratio_class(fallback)
    leaves = [torch.rand(size, requires_grad=True) for size in [(2, 3), (2, 3), (3,)]]

    def f(num, den, d):
        x = write(Ratio(num * 1.0, den * 1.0), d)
        return x.num.sin(), x.den.cos()

    found = MODES[door](f)(*leaves)
    expected = [t.sin() if n == 0 else t.cos() for n, t in enumerate(of_plain(write, *leaves))]
    torch.testing.assert_close(list(found), expected)
    grads = [torch.autograd.grad(sum(t.sum() for t in out), leaves, allow_unused=True, materialize_grads=True)
             for out in (found, expected)]  # fmt: skip
    assert all(type(g) is Tensor for g in grads[0])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("write", [scaled, moved, to_another_row])
def test_a_write_counts_once(write):
    """And the node of a view stays the same object as long as nothing is written."""
    x = ratio_class("views")(torch.rand(2, 3), torch.rand(2, 3, requires_grad=True) * 1)
    part = x[0]
    part *= 2.0
    assert part._version == x._version == 1
    assert part.grad_fn is part.grad_fn
    write(x, torch.rand(3))
    plain = torch.rand(2, 3, requires_grad=True) * 1
    plain[0].mul_(2.0)
    write(plain, torch.rand(3))
    assert x._version == plain._version


@pytest.mark.sweep(2)
@pytest.mark.parametrize("door", MODES)
@pytest.mark.parametrize("of_rule", [False, True])
def test_rules_that_change_the_size_in_place(of_rule, door):
    class Turned(TensorSubclass, fallback="views"):
        num: Tensor = inner(differentiable=True)
        den: Tensor = inner(differentiable=True)

    @Turned.implements(aten.t_.default)
    def _(func, x):
        func(x.num)
        func(x.den)
        return x

    @Turned.implements(aten.mul.Tensor)
    def _(func, x, y):
        return Turned(x.num * y, x.den * x.num)

    def f(num, den):
        x = Turned(num * 1.0, den * 1.0)
        if of_rule:
            x = x * 3.0
        x.t_()
        return x.num.sin() * torch.arange(6.0).reshape(3, 2), x.den.cos()

    def expected(num, den):
        if of_rule:
            num, den = num * 3.0, den * num
        return num.t().sin() * torch.arange(6.0).reshape(3, 2), den.t().cos()

    leaves = [torch.rand(2, 3, requires_grad=True) for _ in range(2)]
    outs = [MODES[door](f)(*leaves), expected(*leaves)]
    torch.testing.assert_close(list(outs[0]), list(outs[1]))
    torch.testing.assert_close(*(torch.autograd.grad(sum(t.sum() for t in out), leaves) for out in outs))


def test_a_rule_that_changes_the_size_of_another_value():
    class Turned(TensorSubclass):
        held: Tensor = inner()

    Turned.implements(aten.t_)(lambda func, x: Turned(x.held.t()))
    x = Turned(torch.ones(2, 3))
    with pytest.raises(
        DispatchError, match=r"in place of the Turned that is to have its sizes; .*x\.held\.t_\(\.\.\.\)"
    ):
        x.t_()
