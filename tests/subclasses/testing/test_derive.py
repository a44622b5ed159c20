"""What the author did not pass is derived where the reference shows that it is right, and nowhere else."""

from __future__ import annotations

import enum
from typing import Literal

import pytest
import torch
from torch import Tensor

from subclasses import TensorSubclass, inner, static
from subclasses.testing import derive, examine
from subclasses.testing.errors import Skipped
from subclasses.testing.subject import Subject
from tests.subclasses.testing import broken
from tests.subclasses.testing.byhand import Tagged


class Sign(enum.Enum):
    PLUS = 1
    MINUS = -1


class Scaled(TensorSubclass, size_from="raw", dtype_from="raw", fallback="materialize"):
    """Static metadata of every kind that can be varied, and one that cannot."""

    raw: Tensor = inner()
    scale: Tensor = inner()
    negate: bool = static(default=False)
    sign: Sign = static(default=Sign.PLUS)
    mode: Literal["exact", "unknown"] = static(default="exact")
    note: str | None = static(default="n")
    label: str = static(default="l")

    def materialize(self):
        if self.mode != "exact":
            raise ValueError(self.mode)
        return self.raw * self.scale * (-1 if self.negate else 1) * self.sign.value


def scaled():
    return Scaled(torch.randn(4, 6), torch.rand(4, 1))


class Totals(TensorSubclass, size_from="raw", dtype_from="raw", fallback="materialize"):
    """What a value stands for depends on all of its rows."""

    raw: Tensor = inner()

    def materialize(self):
        return self.raw - self.raw.sum()


def test_sizes_are_derived_where_the_reference_grows_with_them():
    s = Subject(scaled, {})
    x, *grown = [s.make(factory) for factory in (scaled, *derive.sizes(s))]
    assert [g.shape for g in grown] == [(8, 6), (12, 6)]
    assert grown[0].scale.shape == (8, 1) and s.context(grown[0]) == s.context(x)
    assert s.derived == {"sizes": "2 and 3 times its inner tensors, concatenated"}
    assert [s.make(f).shape[0] for f in derive.sizes(Subject(lambda: Tagged(torch.ones(2, 9)), {}))] == [
        10,
        12,
    ]


def test_sizes_of_the_author_come_first():
    assert derive.sizes(Subject(scaled, {"sizes": [scaled]})) == [scaled]


@pytest.mark.parametrize(
    "factory",
    [
        lambda: broken.SizeInContext(torch.randn(4, 6)),  # another size, another context
        lambda: Totals(torch.randn(4, 6)),
        lambda: Tagged(torch.tensor(1.0)),
        lambda: Tagged(torch.ones(0, 3)),
    ],
)
def test_sizes_that_the_reference_does_not_bear_out_are_not_derived(factory):
    with pytest.raises(Skipped, match="pass sizes="):
        derive.sizes(Subject(factory, {}))


@pytest.mark.slow
def test_variants_are_derived_for_each_static_field_that_can_have_another_value():
    s = Subject(scaled, {})
    made = [s.make(factory) for factory in derive.variants(s)]
    assert [(v.negate, v.sign, v.mode, v.note) for v in made] == [
        (True, Sign.PLUS, "exact", "n"),
        (False, Sign.MINUS, "exact", "n"),
        (False, Sign.PLUS, "exact", None),
    ]
    assert s.derived == {"variants": "negate=True, sign=<Sign.MINUS: -1>, note=None"}


def test_variants_of_a_class_written_by_hand_are_not_derived():
    with pytest.raises(Skipped, match="pass variants="):
        derive.variants(Subject(lambda: Tagged(torch.randn(4, 6)), {}))


class Quantized(Scaled):
    """Made by a factory function, and another of that kind which rounds."""

    @classmethod
    def from_plain(cls, t):
        return cls(t.round(), torch.ones_like(t[..., :1]))

    @classmethod
    def from_float(cls, t):
        return cls(t, torch.ones_like(t[..., :1]))


def test_wrap_is_derived_from_one_inner_tensor_or_a_factory_function():
    s = Subject(lambda: Tagged(torch.randn(4, 6)), {"construct": Tagged})
    assert derive.wrap(s)(torch.ones(3)).data_.tolist() == [1, 1, 1]
    assert s.derived["wrap"].startswith("Tagged(data_)")
    s = Subject(lambda: Quantized(torch.randn(4, 6), torch.rand(4, 1)), {})
    assert isinstance(derive.wrap(s)(torch.rand(3, 2)), Quantized)
    assert s.derived["wrap"].startswith("Quantized.from_float")


def test_wrap_is_not_derived_where_a_value_stands_for_something_else():
    for factory in (scaled, lambda: Totals(torch.randn(4, 6))):
        with pytest.raises(Skipped, match="pass wrap="):
            derive.wrap(Subject(factory, {}))


@pytest.mark.slow
def test_the_report_says_what_was_derived():
    report = examine(scaled, paths={})
    assert report.broken == []
    assert "derived: sizes= from 2 and 3 times its inner tensors, concatenated" in str(report)
    assert "derived: variants= from negate=True" in str(report)
