"""Classes that are right, of kinds that the kit has to know: they keep every promise."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses import Outer, TensorSubclass, inner, static
from subclasses.testing import PATHS, examine
from subclasses.testing.runner import PROMISES


class OneHot(TensorSubclass, fallback="materialize"):
    """Rows that it makes of labels: no inner tensor is differentiable."""

    labels: Tensor = inner(dtype=torch.int64)
    count: int = static()

    @staticmethod
    def outer(labels, count):
        return Outer((*labels.shape, count), dtype=torch.float32)

    def materialize(self):
        return F.one_hot(self.labels, self.count).float()


def make_one_hot():
    return OneHot(torch.randint(0, 6, (4,)), count=6)


@pytest.mark.slow
def test_a_class_of_integers_alone_keeps_all_promises():
    report = examine(make_one_hot, paths={})
    assert report.broken == [], report.details()


@pytest.mark.slow
def test_compiled_gradients_of_a_class_of_integers_alone():
    others = {p.name for p in PROMISES} - {"compiled_gradients"}
    paths = {name: compile for name, compile in PATHS.items() if name == "torch.compile"}
    report = examine(make_one_hot, paths=paths, skip=others)
    assert [o.promise.name for o in report.of("kept")] == ["compiled_gradients"], report.details()


# ---- constructors that take other arguments than the fields --------------------------------------------------


class Halved(TensorSubclass, fallback="materialize"):
    doubled: Tensor = inner()

    def __new__(cls, plain):
        return super().__new__(cls, plain * 2)

    def materialize(self):
        return self.doubled / 2


class HalvedByName(Halved):
    """Its parameter has the name of the field and another meaning."""

    def __new__(cls, doubled):
        return super().__new__(cls, doubled)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (Halved, "its constructor takes other arguments (TypeError: "),
        (HalvedByName, "given the fields of a value, its constructor makes another value"),
    ],
)
def test_a_constructor_of_other_arguments_is_asked_for(cls, words):
    report = examine(lambda: cls(torch.randn(4, 6)), paths={})
    assert report.broken == [], report.details()
    asked = {o.promise.name: o.detail for o in report.of("skipped") if "construct=" in o.detail}
    assert {"fresh_values", "lazy_bits", "inner_requires_grad", "compiled_construction"} <= {*asked}
    assert "which makes a Halved" in asked["fresh_values"] and words in asked["fresh_values"]
    assert "construct= for" in str(report)


@pytest.mark.slow
def test_with_the_constructor_all_promises_are_tried():
    report = examine(
        lambda: Halved(torch.randn(4, 6)), paths={}, construct=lambda doubled: Halved(doubled / 2)
    )
    assert report.broken == [], report.details()
    assert not [o for o in report.of("skipped") if "construct=" in o.detail]


# ---- a class around another one, whose rows are ordinary tensors -----------------------------------------------


class Rows(TensorSubclass):
    rows: Tensor = inner()


@Rows.implements(torch.ops.aten.select.int)
def _(func, x, dim, index):
    return func(x.rows, dim, index)


@Rows.implements(torch.ops.aten.mul)
def times(func, x, y):
    return Rows(x.rows * y)


class Box(TensorSubclass, fallback="map"):
    first: Tensor = inner()
    second: Tensor = inner()


@pytest.mark.slow
def test_rows_of_a_class_around_another_are_views():
    """And the rule that fails is that of the class inside, of which the advice speaks."""
    report = examine(lambda: Box(Rows(torch.randn(4, 3)), Rows(torch.randn(4, 3))), paths={})
    assert report.broken == ["stale_gradients", "optimizer"]  # x * x: the rule takes plain factors alone
    assert all("isinstance(operand, Rows)" in found.mend for found in report.of("broken"))
