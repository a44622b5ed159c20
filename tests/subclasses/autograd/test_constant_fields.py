"""A rule hands on a float field of its operand: an in-place form leaves it as it is, and what saved it is valid."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import desugar
import subclasses
from subclasses import TensorSubclass, inner


class Image(TensorSubclass, fallback="materialize", kind="structure"):
    pixels: Tensor = inner()
    white: Tensor = inner(shape="3")

    def materialize(self):
        return self.pixels * self.white


@Image.implements(subclasses.arithmetic)
def arithmetic(func, x, y):
    first = x if isinstance(x, Image) else y
    a, b = (t.pixels if isinstance(t, Image) else t for t in (x, y))
    return Image(func(a, b), first.white)


@Image.implements(torch.ops.aten.neg_)
def neg_(func, x):
    x.pixels.neg_()
    return x


def written(p, w):
    return (Image(p, w) * 1).sub_(0.5)


def written_twice(p, w):
    return (Image(p, w) * 2).sub_(0.5).neg_().mul_(3)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("fn", [written, written_twice])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("way", ["eager", "desugar"])
def test_the_gradient(fn, trained, way):
    def loss(p, w):
        x = fn(p, w)
        return x.sin().sum() + (x.unwrap("white") ** 2).sum()

    def plain(p, w):
        by = {written: p - 0.5, written_twice: -(p * 2 - 0.5) * 3}[fn]
        return (by * w).sin().sum() + (w**2).sum()

    made = [torch.rand(2, 3), torch.rand(3)]
    got, want = (
        [made[0].clone().requires_grad_(), made[1].clone().requires_grad_(trained)] for _ in range(2)
    )
    run = loss if way == "eager" else desugar.compile(loss, backend="eager")
    for _ in range(2):
        run(*got).backward()
        plain(*want).backward()
    torch.testing.assert_close(got[0].grad, want[0].grad)
    assert not trained or torch.allclose(got[1].grad, want[1].grad)


def test_it_is_not_written_to():
    white = torch.rand(3)
    with torch.enable_grad():
        x = Image(torch.rand(2, 3, requires_grad=True), white) * 1
        before = x.white._version
        x.sub_(0.5)
    assert x.white.data_ptr() == white.data_ptr() and white._version == before


def test_a_rule_that_changes_it_writes():
    class Drifting(TensorSubclass, fallback="map"):
        a: Tensor = inner()
        w: Tensor = inner()

    @Drifting.implements(subclasses.arithmetic)
    def _(func, x, y):
        return Drifting(func(x.a, y), x.w + 1)

    w = torch.zeros(2)
    x = Drifting(torch.rand(2, requires_grad=True), w) * 1
    x.mul_(2)
    assert x.w.tolist() == [2, 2] and w.tolist() == [0, 0]
