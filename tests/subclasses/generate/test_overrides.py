"""What an author's class body writes itself: a method that calls the generated one, an outer size, a joining rule."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor

from subclasses import DispatchError, Outer, TensorSubclass, inner, static
from tests.subclasses.subjects import MODES

aten = torch.ops.aten

COMPILERS = {name: door for name, door in MODES.items() if name != "eager"}


class Base(TensorSubclass, fallback="map"):
    held: Tensor = inner()


@Base.implements(aten.sin.default)
def _(func, x):
    return type(x)(x.held + 1, **({"tag": x.tag} if isinstance(x, Counting) else {}))


class Counting(Base):
    tag: str = static(default="none")
    met: ClassVar[list[str]] = []

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.met.append(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)


class Logged(TensorSubclass, fallback="map"):
    held: Tensor = inner()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return super().__torch_dispatch__(func, types, args, kwargs or {})


class Child(Logged):
    tag: str = static(default="none")


@pytest.mark.parametrize("cls", [Counting, Child])
def test_dispatch_may_be_wrapped(cls):
    x = cls(torch.ones(2), tag="q")
    for result in (x + 1, x.clone(), x[:1], torch.zeros_like(x), x.sin() if cls is Counting else x):
        assert type(result) is cls and result.tag == "q"
    assert (x + 1).held.tolist() == [2, 2] and type(Logged(torch.ones(2)) + 1) is Logged
    leaf = torch.ones(2, requires_grad=True)
    (cls(leaf, tag="q") * 3).unwrap("held").sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [3, 3]
    for compiler in COMPILERS.values():
        out = compiler(lambda x: x * 2)(x)
        assert type(out) is cls and out.tag == "q" and out.held.tolist() == [2, 2]


def test_the_wrapped_dispatch_is_called():
    Counting.met.clear()
    (Counting(torch.ones(2)) + 1).sin()
    assert Counting.met == ["aten.add.Tensor", "aten.sin.default"]


class Ragged(TensorSubclass):
    """Its outer size is known from what is in a tensor alone."""

    numbers: Tensor = inner()
    lengths: Tensor = inner(dtype=torch.int64)

    @staticmethod
    def outer(numbers, lengths):
        return Outer((lengths.shape[0], int(lengths.max())))


@Ragged.implements(aten.mul.Tensor)
def _(func, x, y):
    return Ragged(func(x.numbers, y), x.lengths)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_an_outer_size_that_is_read_from_a_tensor(compiler):
    x = Ragged(torch.ones(5), torch.tensor([2, 3]))
    assert (x * 2).shape == (2, 3)
    with pytest.raises(
        Exception,
        match=r"Ragged\.outer reads what is in an inner tensor.*as a field, `length: int = dynamic\(\)`",
    ):
        COMPILERS[compiler](lambda x: x * 2)(x)


class Viewed(TensorSubclass, fallback="views"):
    held: Tensor = inner()


@Viewed.implements(aten.cat)
@Viewed.implements(aten.stack)
def _(func, tensors, dim=0):
    return Viewed(func([t.held for t in tensors], dim))


@pytest.mark.parametrize("part", [lambda x: x.split(2)[0], lambda x: list(x)[1]])
def test_parts_without_a_gradient_are_explained(part):
    leaf = torch.arange(4.0).requires_grad_()
    with pytest.raises(AttributeError, match="held") as caught:
        part(Viewed(leaf)).unwrap("held").sum().backward()
    (note,) = [n for n in caught.value.__notes__ if "derivative of split" in n]
    assert "let the rule of Viewed take it for zeros, or take single parts by x[i]" in note
    Viewed(leaf)[:2].unwrap("held").sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [1, 1, 0, 0]


def test_an_attribute_error_of_a_rule_stays_as_it_is():
    with pytest.raises(AttributeError, match="held") as caught:
        torch.cat([Viewed(torch.ones(2)), torch.ones(2)])
    assert not hasattr(caught.value, "__notes__") and isinstance(caught.value, AttributeError)
    assert not isinstance(caught.value, DispatchError)
