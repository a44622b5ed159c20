"""The complex pair: the kit and PyTorch's own list of ops find nothing wrong with it."""

from __future__ import annotations

import pytest
import torch

import complex_pair as example
import desugar
from complex_pair import ComplexPair
from subclasses.testing import suite
from tests.examples.command import report_of

aten = torch.ops.aten
W = torch.linspace(-1, 1, 24).view(6, 4)

TestComplexPair = suite(
    example.make,
    ops={
        aten.mm: lambda x: (x, torch.complex(W, W)),
        aten.bmm: lambda x: (x.unsqueeze(0), x.unsqueeze(0).transpose(1, 2)),
        aten.add: lambda x: (x, 1 + 2j),
        aten._unsafe_view: lambda x: (x, [24]),
        aten.permute: lambda x: (x, [1, 0]),
        aten.squeeze: lambda x: (x[:1], 0),
    },
    sizes=[lambda n=n: ComplexPair(torch.randn(n, 6), torch.randn(n, 6)) for n in (5, 7)],
)


# Every way in which an op may run: a rule, a view, materialized, a real result, several results, refused.
SOME = "add mul exp abs angle cat view transpose cumsum matmul nn.functional.linear linalg.inv unbind".split()


@pytest.mark.parametrize(
    ("ops", "at_least"), [(SOME, len(SOME)), pytest.param("all", 300, marks=pytest.mark.slow)]
)
def test_no_op_is_wrong(ops, at_least):
    verdicts = example.count(ComplexPair.from_complex, example.rejoin_pair, ops)
    assert [(name, text) for name, (verdict, text) in verdicts.items() if verdict == "wrong"] == []
    assert verdicts.count("right") >= at_least


@pytest.mark.parametrize("name", example.KNOWN_TROUBLE)
def test_known_trouble(name):
    assert example.judge(name, ComplexPair.from_complex, example.rejoin_pair) == "right"


def test_a_wrong_class_would_be_counted():
    """The sweep sees a rejoining that conjugates, but not where conjugating changes nothing."""

    def conjugate(x):
        return torch.complex(x.re, -x.im) if isinstance(x, ComplexPair) else x

    found = example.count(ComplexPair.from_complex, conjugate, ["exp", "abs", "angle"])
    assert found["exp"][0] == found["abs"][0] == "right"
    assert found["angle"][0] == "wrong"


@pytest.mark.parametrize("real", [torch.float32, torch.float64])
def test_promotion_follows_pytorch(real):
    x = ComplexPair(torch.ones(2, dtype=real), torch.ones(2, dtype=real))
    others = [2, 2.5, 1j, torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64)]
    for other in [*others, torch.ones(2, dtype=torch.complex128), torch.tensor(2.0)]:
        for op in (torch.add, torch.mul, torch.sub):
            got, expected = op(x, other), op(x.materialize(), other)
            assert got.dtype == expected.dtype
            torch.testing.assert_close(example.rejoin_pair(got), expected)


def test_views_of_parts_that_start_elsewhere():
    base = torch.arange(12.0)
    x = ComplexPair(base[2:8].view(2, 3), base[6:].view(2, 3))
    z = x.materialize()
    assert torch.equal(x[1:].materialize(), z[1:])
    compiled = desugar.compile(lambda x: x[1:], backend="eager")(x)
    assert torch.equal(compiled.materialize(), z[1:])


@pytest.mark.parametrize("ops", [SOME, pytest.param("all", marks=pytest.mark.slow)])
def test_the_report(ops, capsys, monkeypatch):
    out = report_of(example, monkeypatch, capsys, ops)
    assert "ComplexPair: of " in out and "softmax right, addr right, inv right" in out
    assert "breaks none" in out
