"""The int8 weight and the complex pair: the kit finds nothing, and results are the right ones."""

import pytest
import torch
import torch.nn.functional as F

import complex_pair
import int8_weight
from complex_pair import ComplexPair
from int8_weight import Int8ByHand, Int8Weight
from subclasses.testing import suite
from tests.doors import by_desugar
from tests.examples.classes.checks import agreeing
from tests.examples.command import report_of
from tests.tables import giving

aten = torch.ops.aten
W, X = torch.linspace(-1, 1, 24).view(6, 4), torch.linspace(-1, 1, 18).view(3, 6)


def int8(dtype=torch.float32, rows=4):
    return int8_weight.quantizer(Int8Weight)(torch.randn(rows, 6, dtype=dtype))


globals().update(
    TestInt8Weight=suite(
        int8, ops={F.linear: lambda x: (X, x)}, sizes=[lambda n=n: int8(rows=n) for n in (5, 7)]
    ),
    TestInt8WeightOfBfloat16=pytest.mark.slow(
        suite(lambda: int8(torch.bfloat16), paths={}, rtol=0.05, atol=0.05)
    ),
    TestComplexPair=suite(
        complex_pair.make,
        ops={
            aten.mm: lambda x: (x, torch.complex(W, W)),
            aten.bmm: lambda x: (x.unsqueeze(0), x.unsqueeze(0).transpose(1, 2)),
            aten.add: lambda x: (x, 1 + 2j),
            aten._unsafe_view: lambda x: (x, [24]),
            aten.permute: lambda x: (x, [1, 0]),
            aten.squeeze: lambda x: (x[:1], 0),
        },
        sizes=[lambda n=n: ComplexPair(torch.randn(n, 6), torch.randn(n, 6)) for n in (5, 7)],
    ),
)

# Every way in which an op may run: a rule, a view, materialized, a real result, several results, refused.
SOME = "add mul exp abs angle cat view transpose cumsum matmul nn.functional.linear linalg.inv unbind".split()
REPORTS = {
    "complex pair": (complex_pair, [SOME], ["ComplexPair: of ", "softmax right, addr right, inv right"]),
    "complex pair, all ops": (
        complex_pair,
        ["all"],
        ["ComplexPair: of ", "softmax right, addr right, inv right"],
    ),
    "int8": (
        int8_weight,
        [],
        [
            f"{int8_weight.count_code_lines(Int8Weight, int8_weight.linear):<12}",
            *("Int8Weight keeps", "Int8ByHand keeps", "inner_requires_grad"),
        ],
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "complex pair" else pytest.mark.slow) for n in REPORTS]
)
def test_the_report(name, capsys, monkeypatch):
    example, arguments, words = REPORTS[name]
    out = report_of(example, monkeypatch, capsys, *arguments)
    assert all(each in out for each in (*words, "breaks none"))


# ---- int8 ------------------------------------------------------------------------------------------------------


test_every_way_works = giving(
    {
        **{
            cls.__name__: (
                lambda cls=cls: int8_weight.try_ways(cls),
                dict.fromkeys(int8_weight.WAYS, "yes"),
            )
            for cls in (Int8Weight, Int8ByHand)
        },
        **{
            f"known trouble: {name}": (
                lambda name=name: complex_pair.judge(
                    name, ComplexPair.from_complex, complex_pair.rejoin_pair
                ),
                "right",
            )
            for name in complex_pair.KNOWN_TROUBLE
        },
    }
)


@pytest.mark.parametrize("way", ["eager", "inference mode"])
def test_a_wrong_rule_would_show(way, monkeypatch):
    monkeypatch.setattr(
        Int8ByHand, "linear", staticmethod(lambda x, w, bias=None: F.linear(x, w.qdata.to(x.dtype)))
    )
    assert int8_weight.try_ways(Int8ByHand)[way] == "wrong"


def test_the_declaration_has_at_most_twelve_lines(tmp_path, monkeypatch):
    (tmp_path / "counted.py").write_text("def f(x):\n    # a comment\n\n    return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    count = int8_weight.count_code_lines
    assert count(__import__("counted").f) == 2
    assert count(Int8Weight, int8_weight.linear) <= 12 < 30 < count(Int8ByHand)


# ---- complex numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ops", "at_least"), [(SOME, len(SOME)), pytest.param("all", 300, marks=pytest.mark.slow)]
)
def test_no_op_is_wrong(ops, at_least):
    verdicts = complex_pair.count(ComplexPair.from_complex, complex_pair.rejoin_pair, ops)
    assert [(name, text) for name, (verdict, text) in verdicts.items() if verdict == "wrong"] == []
    assert verdicts.count("right") >= at_least


def test_a_wrong_class_would_be_counted():
    """The sweep sees a rejoining that conjugates, but not where conjugating changes nothing."""

    def conjugate(x):
        return torch.complex(x.re, -x.im) if isinstance(x, ComplexPair) else x

    found = complex_pair.count(ComplexPair.from_complex, conjugate, ["exp", "abs", "angle"])
    assert [found[name][0] for name in ("exp", "abs", "angle")] == ["right", "right", "wrong"]


OTHERS = [
    *(2, 2.5, 1j, torch.tensor(2.0)),
    *(torch.ones(2, dtype=getattr(torch, name)) for name in ("float32", "float64", "int64", "complex128")),
]


BASE = torch.arange(12.0)
test_results = agreeing(
    {
        "rows of zeros and a single number": (
            [lambda w=w: w for w in (torch.zeros(2, 3), torch.zeros(0, 3), torch.full((1, 1), -2.0))],
            lambda w: [(int8_weight.quantizer(Int8Weight)(w).materialize(), w)],
        ),
        "promotion follows PyTorch": (
            [
                lambda real=real: ComplexPair(*torch.ones(2, 2, dtype=real))
                for real in (torch.float32, torch.float64)
            ],
            lambda x: [
                (
                    (
                        complex_pair.rejoin_pair(op(x, other)),
                        op(x, other).dtype == op(x.materialize(), other).dtype,
                    ),
                    (op(x.materialize(), other), True),
                )
                for other in OTHERS
                for op in (torch.add, torch.mul, torch.sub)
            ],
        ),
        "views of parts that start elsewhere": (
            [lambda: ComplexPair(BASE[2:8].view(2, 3), BASE[6:].view(2, 3))],
            lambda x: [
                (part.materialize(), x.materialize()[1:]) for part in (x[1:], by_desugar(lambda x: x[1:])(x))
            ],
        ),
    }
)
