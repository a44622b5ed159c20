"""In-place ops whose write would be cast to another dtype, or whose rule returns nothing, are errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import desugar
import subclasses
from subclasses import SpecError, TensorSubclass, inner


class Length(TensorSubclass):
    number: Tensor = inner()


@Length.implements(subclasses.arithmetic)
def _(func, x, y):
    return Length(*(func(*(v.number if isinstance(v, Length) else v for v in (x, y))),))


class Returning(TensorSubclass, fallback="materialize"):
    number: Tensor = inner()

    def materialize(self):
        return self.number * 2


@Returning.implements(torch.ops.aten.add_.Tensor)
def _(func, x, y):
    return Returning(func(x.number, y))


@Returning.implements(torch.ops.aten.sub_.Tensor)
def _(func, x, y):
    func(x.number, y)
    return x


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("number", "write"),
    [
        (torch.tensor([1, 2, 3]), lambda x: x.mul_(1.5)),
        (torch.tensor([1, 2, 3]), lambda x: x.div_(2)),
        (torch.tensor([1.0, 2.0]), lambda x: x.mul_(1j)),
        (torch.tensor([True, False]), lambda x: x.add_(1)),
        (torch.tensor([1, 2]), lambda x: torch.mul(x, 1.5, out=x)),
    ],
    ids=["a factor", "a division", "a complex factor", "a bool", "out"],
)
def test_no_dtype_is_narrowed(number, write, compiled):
    """As for plain tensors."""
    with pytest.raises(RuntimeError, match="can't be cast"):
        write(number.clone())
    x = Length(number.clone())
    run = desugar.compile(write, backend="eager") if compiled else write
    with pytest.raises(RuntimeError, match=r"result type .* can't be cast"):
        run(x)
    assert x.number.equal(number)


def test_what_can_be_cast_is_written():
    x = Length(torch.tensor([1.0, 2.0]))
    x *= 2
    x += Length(torch.tensor([1, 1]))
    assert x.number.tolist() == [3.0, 5.0]
    x = Length(torch.tensor([1, 2]))
    x.copy_(Length(torch.tensor([1.7, 2.7])))
    assert x.number.tolist() == [1, 2]


def test_a_rule_that_writes_is_taken():
    x = Returning(torch.ones(3))
    y = x
    x += 3
    x -= 1
    assert x is y and x.number.tolist() == [3, 3, 3]


def test_an_in_place_method_returns_something():
    with pytest.raises(SpecError, match="returns nothing"):

        @Returning.implements(Tensor.mul_)
        def _(func, x, y):
            x.number.mul_(y)
