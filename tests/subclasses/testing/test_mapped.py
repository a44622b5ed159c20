"""Classes that run each op on each inner tensor, where that is not what their values mean."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from subclasses import TensorSubclass, inner
from subclasses.testing import examine
from subclasses.testing.runner import PROMISES


class Mean(TensorSubclass, fallback="map"):
    """Twice the total and twice the count are the same mean."""

    total: Tensor = inner()
    count: Tensor = inner()

    def materialize(self):
        return self.total / self.count


class MeanOfRows(Mean):
    def materialize(self):
        return self.total / self.count[:, None]


class MaterializedMean(TensorSubclass, fallback="materialize"):
    total: Tensor = inner()
    count: Tensor = inner()

    def materialize(self):
        return self.total / self.count


class First(TensorSubclass, fallback="map"):
    """Numbers and notes on them, which take the same ops."""

    numbers: Tensor = inner()
    notes: Tensor = inner()

    def materialize(self):
        return self.numbers.clone()


def make(cls):
    return cls(torch.rand(4, 6), torch.rand(4, 6) + 1)


@pytest.mark.slow
def test_a_materialize_that_the_map_contradicts_is_found():
    (found,) = examine(lambda: make(Mean), paths={}).of("broken")
    assert found.promise.name == "mapped_values"
    assert "materialize() of x * 2 is not what the op gives of x.materialize()" in found.detail
    assert 'use fallback="materialize"' in found.mend and "skip={'mapped_values'}" in found.mend


@pytest.mark.slow
def test_a_materialize_that_agrees_with_the_map_keeps_all_promises():
    for cls in (First, MaterializedMean):
        report = examine(lambda cls=cls: make(cls), paths={})
        assert report.broken == [], report.details()


def test_the_reference_of_the_author_decides():
    others = {p.name for p in PROMISES} - {"values", "mapped_values"}
    report = examine(lambda: make(Mean), paths={}, reference=lambda x: (x.total, x.count), skip=others)
    assert report.broken == [], report.details()


@pytest.mark.slow
def test_an_inner_tensor_of_another_size_is_one_entry():
    report = examine(lambda: MeanOfRows(torch.rand(4, 6), torch.rand(4) + 1), paths={})
    assert {"outside", "values", "views", "random_backward"} <= {*report.broken}
    assert len({o.mend for o in report.of("broken")}) == 1
    (entry,) = [line for line in str(report).splitlines() if line.startswith("- ")]
    assert "count has size [4], the value [4, 6]" in entry
    assert '  mend: fallback="map" runs each op on each inner tensor' in str(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "fits"), [(lambda x: x.numbers, False), (lambda x: x.numbers + x.notes, True)]
)
def test_a_reference_that_plain_cotangents_contradict(reference, fits):
    """Each inner tensor gets a plain cotangent."""
    report = examine(lambda: First(torch.randn(4, 6), torch.randn(4, 6)), reference=reference, paths={})
    broken = {o.promise.name: o.mend for o in report.of("broken")}
    told = [mend for mend in broken.values() if "whatever reference= makes of them" in mend]
    assert bool(told) is not fits
    assert all("define wrap_cotangent" in mend and "look at" not in mend for mend in told)
