"""In-place ops in training, of a class that holds a mask besides its numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import desugar
import subclasses
from subclasses import TensorSubclass, inner
from tests.subclasses.subjects import MODES


class Masked(TensorSubclass, fallback="views"):
    numbers: Tensor = inner()
    known: Tensor = inner(dtype=torch.bool)


@Masked.implements(subclasses.arithmetic)
def _(func, x, y):
    known = [t.known for t in (x, y) if isinstance(t, Masked)]
    x, y = (t.numbers if isinstance(t, Masked) else t for t in (x, y))
    return Masked(func(x, y), known[0].clone() if len(known) == 1 else known[0] & known[1])


class Kept(Masked, fallback="views"):
    """What is unknown stays as it is, which the backward of the rule knows by the mask."""


@Kept.implements(subclasses.arithmetic)
def _(func, x, y):
    if not (isinstance(x, Kept) and isinstance(y, Kept)):
        return Kept(func(x.numbers, y), x.known.clone())
    return Kept(torch.where(x.known & y.known, func(x.numbers, y.numbers), x.numbers), x.known & y.known)


def added(x, y):
    z = x * 1.0
    z += y
    z.mul_(2.0)
    return z


def of_a_copy(x, y):
    z = x.clone()
    z.sub_(y)
    return z * 3.0


def twice(x, y):
    z = x + 0.0
    z *= y
    z *= y
    return z


def by_a_view(x, y):
    z = x * 1.0
    z[:1] *= 3.0
    z[1:] += y[1:]
    return z


def functionally(x, y):
    return {added: lambda: (x + y) * 2, of_a_copy: lambda: (x - y) * 3, twice: lambda: x * y * y}


@pytest.mark.sweep(10)
@pytest.mark.parametrize("door", MODES)
@pytest.mark.parametrize("cls", [Masked, Kept])
@pytest.mark.parametrize("same", [True, False], ids=["equal masks", "other masks"])
@pytest.mark.parametrize("function", [added, of_a_copy, twice])
def test_gradients_are_those_of_the_ops_that_write_nothing(function, same, cls, door):
    leaves = [
        torch.tensor([1.0, 2.0, 3.0], requires_grad=True),
        torch.tensor([3.0, 4.0, 5.0], requires_grad=True),
    ]
    masks = [torch.tensor([True, False, True]), torch.tensor([True, False, same])]
    compiled = MODES[door](function)
    for _ in range(2):
        x, y, u, v = (cls(t, m.clone()) for t, m in zip(leaves * 2, masks * 2, strict=True))
        got, expected = compiled(x, y), functionally(u, v)[function]()
        assert torch.equal(got.known, expected.known) and torch.equal(got.numbers, expected.numbers)
        gradients = [
            torch.autograd.grad(z.unwrap("numbers").square().sum(), leaves, allow_unused=True)
            for z in (got, expected)
        ]
        torch.testing.assert_close(*gradients)
        assert all(torch.equal(t.known, m) for t, m in zip((x, y), masks, strict=True))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("door", MODES)
def test_writes_to_views(door):
    a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    known = torch.tensor([True, False, True])
    z = MODES[door](by_a_view)(Masked(a, known), Masked(b, known.clone()))
    gradients = torch.autograd.grad(z.unwrap("numbers").sum(), (a, b))
    assert [g.tolist() for g in gradients] == [[3, 1, 1], [0, 1, 1]]


# ---- a rule for copy_ ------------------------------------------------------------------------------------------


def with_copies(copies_values=True):
    class Known(TensorSubclass, fallback="views"):
        held: Tensor = inner()
        known: Tensor = inner(dtype=torch.bool)

    @Known.implements(torch.ops.aten.copy_)
    def copying(func, x, source, non_blocking=False):
        if copies_values and isinstance(source, Known):
            x.held.copy_(source.held)
            x.known.copy_(source.known)
        else:
            x.held.copy_(source)
            x.known.fill_(True)
        return x

    @Known.implements(torch.ops.aten.mul)
    def _(func, x, y):
        return Known(x.held * y, x.known.clone())

    return Known


@pytest.mark.parametrize("door", ["eager", "desugar"])
def test_a_rule_for_copy_writes_the_mask_of_a_view(door):
    cls = with_copies()

    def assign(x, source):
        x[1].copy_(source[1])
        return x

    a, b = (torch.full((2, 2), n, requires_grad=True) for n in (1.0, 3.0))
    x = cls(a * 1, torch.zeros(2, 2, dtype=torch.bool))
    source = cls(b * 1, torch.ones(2, 2, dtype=torch.bool))
    fn = assign if door == "eager" else desugar.compile(assign, backend="eager")
    y = fn(x, source)
    got = torch.autograd.grad(y.unwrap("held").sum(), (a, b))
    assert [g.tolist() for g in got] == [[[1, 1], [0, 0]], [[0, 0], [1, 1]]]
    assert y.known.tolist() == [[False, False], [True, True]]


def test_a_rule_for_copy_that_takes_no_value_is_named():
    x = with_copies(copies_values=False)(torch.ones(2), torch.zeros(2, dtype=torch.bool))
    x.copy_(torch.full((2,), 5.0))
    assert x.held.tolist() == [5, 5] and x.known.all()
    with pytest.raises(AttributeError) as found:
        x.mul_(2)
    assert "copying (" in str(found.value.__notes__) and "isinstance(source, Known)" in str(
        found.value.__notes__
    )
