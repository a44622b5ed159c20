"""Rules that are right for some calls and not for others: the kit makes a call of each kind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from subclasses import TensorSubclass, inner
from subclasses.testing import examine

aten = torch.ops.aten


class Halves(TensorSubclass, fallback="materialize"):
    """The sum of two tensors, which are no coordinates of it."""

    one: Tensor = inner()
    other: Tensor = inner()

    def materialize(self):
        return self.one + self.other


class SquaresEach(Halves):
    """Takes the product of two sums for the sum of two products."""


@SquaresEach.implements(aten.mul)
def _(func, x, y):
    one, other = ((t.one, t.other) if isinstance(t, Halves) else (t, t) for t in (x, y))
    return SquaresEach(func(one[0], other[0]), func(one[1], other[1]))


class DropsTheDim(Halves):
    """A sum that forgets ``keepdim``."""


@DropsTheDim.implements(aten.sum)
def _(func, x, dim=None, keepdim=False, dtype=None):
    return DropsTheDim(x.one.sum(dim, dtype=dtype), x.other.sum(dim, dtype=dtype))


class DropsTheBias(Halves):
    """A weight whose rule for a layer forgets the bias."""


@DropsTheBias.implements(torch.nn.functional.linear)
def _(func, x, w, bias=None):
    if not isinstance(w, Halves):
        return Halves.unruled(func, x, w, bias)
    return func(x, sum(w.unwrap()))


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("cls", "call"),
    [
        (SquaresEach, "x * x is not"),
        (DropsTheDim, r"x.sum(-1, keepdim=True) has shape [4]"),
        (DropsTheBias, "F.linear(plain, x, bias) is not"),
    ],
)
def test_a_rule_that_is_right_for_some_calls_is_found(cls, call):
    report = examine(lambda: cls(torch.randn(4, 6), torch.randn(4, 6)), paths={})
    (values,) = (o for o in report.of("broken") if o.promise.name == "values")
    assert call in values.detail
