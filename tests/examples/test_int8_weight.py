"""The int8 weight: every way works, the counts are counts, the kit finds nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import int8_weight as example
from int8_weight import Int8ByHand, Int8Weight
from subclasses.testing import check, suite
from tests.examples.command import report_of

X = torch.linspace(-1, 1, 18).view(3, 6)


def make():
    return example.quantizer(Int8Weight)(torch.randn(4, 6))


TestInt8Weight = suite(
    make,
    ops={F.linear: lambda x: (X, x)},
    sizes=[lambda n=n: example.quantizer(Int8Weight)(torch.randn(n, 6)) for n in (5, 7)],
)


@pytest.mark.parametrize("cls", [Int8Weight, Int8ByHand])
def test_every_way_works(cls):
    assert example.try_ways(cls) == dict.fromkeys(example.WAYS, "yes")


@pytest.mark.parametrize("way", ["eager", "inference mode"])
def test_a_wrong_rule_would_show(way, monkeypatch):
    wrong = staticmethod(lambda x, w, bias=None: F.linear(x, w.qdata.to(x.dtype)))
    monkeypatch.setattr(Int8ByHand, "linear", wrong)
    assert example.try_ways(Int8ByHand)[way] == "wrong"


def test_the_declaration_has_at_most_twelve_lines(tmp_path, monkeypatch):
    (tmp_path / "counted.py").write_text("def f(x):\n    # a comment\n\n    return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert example.count_code_lines(__import__("counted").f) == 2
    assert (
        example.count_code_lines(Int8Weight, example.linear) <= 12 < 30 < example.count_code_lines(Int8ByHand)
    )


@pytest.mark.parametrize("w", [torch.zeros(2, 3), torch.zeros(0, 3), torch.full((1, 1), -2.0)])
def test_rows_of_zeros_and_a_single_number(w):
    torch.testing.assert_close(example.quantizer(Int8Weight)(w).materialize(), w)


@pytest.mark.slow
def test_bfloat16():
    check(lambda: example.quantizer(Int8Weight)(torch.randn(4, 6).bfloat16()), paths={}, rtol=0.05, atol=0.05)


@pytest.mark.slow
def test_the_report(capsys, monkeypatch):
    out = report_of(example, monkeypatch, capsys)
    assert f"{example.count_code_lines(Int8Weight, example.linear):<12}" in out
    assert "Int8Weight keeps" in out and "breaks none" in out
    assert "Int8ByHand keeps" in out and "inner_requires_grad" in out
