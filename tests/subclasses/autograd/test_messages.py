"""What an author or a user does wrong with derivatives by rules and with cotangents, and what the errors say."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor

from subclasses import DispatchError, TensorSubclass, inner

aten = torch.ops.aten


class Halves(TensorSubclass, fallback="materialize", kind="structure"):
    """Stands for twice its inner tensor."""

    held: Tensor = inner()

    def materialize(self):
        return self.held * 2


@Halves.implements(aten.mul.Tensor)
def _(func, x, y):
    return Halves(func(x.held, y))


def leaf():
    return torch.ones(3, requires_grad=True)


# ---- a second backward -------------------------------------------------------------------------------------------

BACKWARDS = {
    "by an inner tensor": lambda y, **how: y.unwrap("held").sum().backward(**how),
    "by the whole": lambda y, **how: y.materialize().sum().backward(**how),
    "by a gradient of the class": lambda y, **how: y.backward(y.cotangent(torch.ones(3)), **how),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_a_second_backward(name):
    backward = BACKWARDS[name]
    y = Halves(leaf()) * 3
    backward(y)
    with pytest.raises(RuntimeError, match="second time"):
        backward(y)


@pytest.mark.parametrize("name", BACKWARDS)
def test_a_second_backward_that_the_first_retains(name):
    backward = BACKWARDS[name]
    x = leaf()
    y = Halves(x) * 3
    backward(y, retain_graph=True)
    first = x.grad.clone()
    backward(y)
    assert torch.equal(x.grad, 2 * first)


# ---- a plain cotangent ---------------------------------------------------------------------------------------------


class Box(TensorSubclass):
    """Says nothing of what it stands for."""

    held: Tensor = inner()


class Noting(Box):
    """Notes what arrives, and leaves the rest to the base."""

    seen: ClassVar[list[torch.Size]] = []

    def wrap_cotangent(self, cotangent):
        self.seen.append(cotangent.shape)
        return super().wrap_cotangent(cotangent)


TEXT = r"{}: a plain cotangent needs a method `materialize\(self\) -> Tensor`, or `wrap_cotangent\(self, cotangent\)`"


def test_a_plain_cotangent_of_a_class_that_does_not_materialize():
    with pytest.raises(DispatchError, match=TEXT.format("Box")):
        Box(torch.ones(3)).wrap_cotangent(torch.ones(3))


def test_a_method_that_leaves_the_cotangent_to_the_base():
    Noting.seen.clear()
    x = Noting(leaf())
    with pytest.raises(DispatchError, match=TEXT.format("Noting") + " that returns it as a Noting"):
        x.backward(torch.ones(3))
    assert Noting.seen == [torch.Size([3])]
