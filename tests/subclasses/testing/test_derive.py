"""The kit derives subjects that the author did not pass, only if the reference shows that they are right."""

import enum
from typing import Literal

import pytest
import torch

from subclasses import inner, static
from subclasses.testing import derive, examine
from subclasses.testing.errors import Skipped
from subclasses.testing.subject import Subject
from tests.subclasses.subjects import declare
from tests.subclasses.testing import broken
from tests.subclasses.testing.byhand import Tagged
from tests.subclasses.testing.faults import of_tensors
from tests.tables import raising

Sign = enum.Enum("Sign", {"PLUS": 1, "MINUS": -1}, module=__name__)


def signed(self):
    if self.mode != "exact":
        raise ValueError(self.mode)
    return self.raw * self.scale * (-1 if self.negate else 1) * self.sign.value


# Static metadata of every kind that can be varied, and one that cannot.
Scaled = declare(
    name="Scaled",
    __module__=__name__,
    keywords={"size_from": "raw", "dtype_from": "raw", "fallback": "materialize"},
    raw=inner(),
    scale=inner(),
    negate=static(default=False),
    sign=static(default=Sign.PLUS),
    mode=static(default="exact"),
    note=static(default="n"),
    label=static(default="l"),
    annotations={
        "negate": bool,
        "sign": Sign,
        "mode": Literal["exact", "unknown"],
        "note": str | None,
        "label": str,
    },
    materialize=signed,
)


def scaled():
    return Scaled(torch.randn(4, 6), torch.rand(4, 1))


# The tensor that a value represents depends on all of its rows.
Totals = declare(
    name="Totals",
    keywords={"fallback": "materialize"},
    raw=inner(),
    materialize=lambda self: self.raw - self.raw.sum(),
)


def test_sizes_are_derived_where_the_reference_grows_with_them():
    s = Subject(scaled, {})
    x, *grown = [s.make(factory) for factory in (scaled, *derive.sizes(s))]
    assert [g.shape for g in grown] == [(8, 6), (12, 6)]
    assert grown[0].scale.shape == (8, 1) and s.context(grown[0]) == s.context(x)
    assert s.derived == {"sizes": "2 and 3 times its inner tensors, concatenated"}
    s = Subject(lambda: Tagged(torch.ones(2, 9)), {})
    assert [s.make(f).shape[0] for f in derive.sizes(s)] == [10, 12]
    assert derive.sizes(Subject(scaled, {"sizes": [scaled]})) == [scaled]  # the author's come first


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


# Made by a factory function, and another of that kind which rounds.
Quantized = declare(
    Scaled,
    name="Quantized",
    from_plain=classmethod(lambda cls, t: cls(t.round(), torch.ones_like(t[..., :1]))),
    from_float=classmethod(lambda cls, t: cls(t, torch.ones_like(t[..., :1]))),
)


def test_wrap_is_derived_from_one_inner_tensor_or_a_factory_function():
    s = Subject(lambda: Tagged(torch.randn(4, 6)), {"construct": Tagged})
    assert derive.wrap(s)(torch.ones(3)).data_.tolist() == [1, 1, 1]
    assert s.derived["wrap"].startswith("Tagged(data_)")
    s = Subject(lambda: Quantized(torch.randn(4, 6), torch.rand(4, 1)), {})
    assert isinstance(derive.wrap(s)(torch.rand(3, 2)), Quantized)
    assert s.derived["wrap"].startswith("Quantized.from_float")


test_what_the_reference_does_not_bear_out_is_not_derived = raising(
    [
        (
            lambda option=option, factory=factory: getattr(derive, option)(Subject(factory, {})),
            Skipped,
            f"pass {option}=",
        )
        for option, factory in [
            ("sizes", of_tensors(broken.SizeInContext, (4, 6))),  # another size, another context
            ("sizes", of_tensors(Totals, (4, 6))),
            ("sizes", lambda: Tagged(torch.tensor(1.0))),
            ("sizes", lambda: Tagged(torch.ones(0, 3))),
            ("variants", of_tensors(Tagged, (4, 6))),
            ("wrap", scaled),  # a value represents a different tensor
            ("wrap", of_tensors(Totals, (4, 6))),
        ]
    ]
)


@pytest.mark.slow
def test_the_report_says_what_was_derived():
    report = examine(scaled, paths={})
    assert report.broken == []
    assert "derived: sizes= from 2 and 3 times its inner tensors, concatenated" in str(report)
    assert "derived: variants= from negate=True" in str(report)
