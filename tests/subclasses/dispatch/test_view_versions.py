"""What autograd saved of a view's inner tensors is stale after a write to the base, and the other way around."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from subclasses import TensorSubclass, inner

aten = torch.ops.aten


class Mapped(TensorSubclass, fallback="map"):
    a: Tensor = inner()


class Views(TensorSubclass, fallback="views"):
    a: Tensor = inner()


@Views.implements(aten.mul.Tensor)
def _(func, x, y):
    return Views(x.a * y)


class Ruled(TensorSubclass, fallback="materialize", trainable=True):
    a: Tensor = inner()

    def materialize(self):
        return self.a * 2


@Ruled.implements(aten.slice, aten.select)
def _(func, x, *args):
    return Ruled(func(x.a, *args))


class Box(TensorSubclass, fallback="map"):
    low: Tensor = inner()


VIEWS = {
    "slice": lambda x: x[:1],
    "select": lambda x: x[0],
    "detach": lambda x: x.detach(),
    "of a view": lambda x: x[:2][:1],
}


def squares(x):
    (a,) = x.unwrap()
    a = a.unwrap()[0] if isinstance(a, TensorSubclass) else a
    return a


def is_stale(backward):
    try:
        backward()
    except RuntimeError as error:
        return "inplace" in str(error) or "in-place" in str(error) or "modified" in str(error)
    return False


@pytest.mark.parametrize("cls", [Mapped, Views, Ruled, Box])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("written", ["the base", "the view"])
def test_a_write_to_one_is_seen_by_what_was_saved_of_the_other(cls, view, written):
    held = torch.tensor([3.0, 4.0, 5.0])
    x = Box(Mapped(held)) if cls is Box else cls(held)
    with torch.no_grad():
        y = VIEWS[view](x)
    leaf = torch.tensor(2.0, requires_grad=True)
    saved, other = (y, x) if written == "the base" else (x, y)
    loss = (leaf * squares(saved)).sum()  # saves the inner tensor of one
    with torch.no_grad():
        if cls is Ruled:
            other.unwrap()[0].mul_(10)
        else:
            other.mul_(10)
    assert is_stale(loss.backward)


def test_views_that_are_not_written_to_are_not_stale():
    x = Mapped(torch.tensor([3.0, 4.0])).requires_grad_()
    loss = (x[:1].unwrap()[0] ** 2).sum() + (x.unwrap()[0] ** 2).sum()
    loss.backward()
    assert x.grad.a.tolist() == [12, 8]


def test_a_value_inside_of_a_parameter_that_changed_is_noticed():
    class Outer(TensorSubclass, fallback="materialize", trainable=True):
        low: Tensor = inner()

        def materialize(self):
            return self.low.materialize() if isinstance(self.low, Ruled) else self.low

    w = nn.Parameter(Outer(Ruled(torch.tensor([3.0]))))
    (low,) = w.unwrap()
    (a,) = low.unwrap()
    loss = (a * a).sum()
    with torch.no_grad():
        w.mul_(10)
    assert is_stale(loss.backward)
