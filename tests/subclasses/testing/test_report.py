"""A report fits one screen: first the values that were not compared, then the causes with their fixes.

The rest of the report is not lost.
"""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch.masked import MaskedTensor
from torch.testing._internal.two_tensor import TwoTensor

from subclasses import inner
from subclasses.testing import examine
from subclasses.testing.report import LINES, WIDTH, Failure, Outcome, Promise, Report
from tests.subclasses.subjects import declare
from tests.subclasses.testing.broken import computes, raising
from tests.subclasses.testing.faults import finding, of_tensors, outcome as outcome_of, ruled

aten = torch.ops.aten
ROOT = Path(__file__).parents[3]


def assert_fits(report):
    """One screen, and all outcomes in the details."""
    lines = str(report).splitlines()
    assert len(lines) <= LINES == 24 and max(map(len, lines)) <= WIDTH == 110
    assert all(o.detail in report.details() and o.mend in report.details() for o in report.outcomes)


# ---- compared values ---------------------------------------------------------------------------------------


# Inner tensors of two dtypes; the value has one of them.
Mixed = declare(
    keywords={"size_from": "wide", "fallback": "map"}, narrow=inner(dtype=torch.bfloat16), wide=inner()
)
Interval = declare(keywords={"fallback": "map"}, low=inner(), high=inner())


@pytest.mark.slow
def test_a_mapped_class_whose_ops_are_not_those_on_each_inner_tensor_needs_a_reference():
    turned = ruled(Interval, {aten.neg: lambda func, x: type(x)(func(x.high), func(x.low))}, fallback="map")
    for make in (
        lambda: turned(torch.zeros(4, 6), torch.ones(4, 6)),
        lambda: Mixed(torch.ones(4, 6).bfloat16(), torch.ones(4, 6)),
    ):
        report = examine(make, paths={}, skip={"values", "inner_gradients", "cotangents"})
        assert "NO RESULT WAS COMPARED" in str(report).splitlines()[1] and report.broken == []
        assert "reference= for outside" in " ".join(str(report).split())


# ---- classes of others -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize("options", [{}, {"reference": lambda x: (x.a, x.b)}], ids=["bare", "reference"])
def test_two_tensor_fits_one_screen(options):
    report = examine(of_tensors(TwoTensor), paths={}, **options)
    text = str(report)
    assert_fits(report)
    assert ("NO RESULT WAS COMPARED" in text.splitlines()[1]) is not bool(options)
    assert all(name in text for name in report.broken)
    assert "mend: in __torch_dispatch__, `return NotImplemented` if types holds a class" in text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_class_that_cannot_be_flattened_is_told_what_it_lacks_and_what_works():
    report = examine(lambda: MaskedTensor(torch.randn(4, 6), torch.rand(4, 6) > 0.5))
    text = str(report)
    assert_fits(report)
    for words in (
        "NO RESULT WAS COMPARED",
        "such as reference=lambda x: x.get_data()",
        "NOTHING WAS COMPILED OR FLATTENED: MaskedTensor is not a traceable wrapper subclass",
        "MaskedTensor has no __tensor_flatten__ and no __tensor_unflatten__",
        "its attributes hold the tensors _masked_data, _masked_mask",
    ):
        assert words in text
    kept = {o.promise.name for o in report.of("kept")}
    assert {"printing", "clone_and_detach", "deepcopy", "conversion"} <= kept


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"reference": lambda x: x.dequantize()}], ids=["bare", "reference"])
def test_torchaos_int8_tensor_fits_one_screen(options):
    quantization = pytest.importorskip("torchao.quantization")
    linear = torch.nn.Linear(64, 32)
    quantization.quantize_(linear, quantization.Int8WeightOnlyConfig(version=2))
    weight = linear.weight.detach()
    report = examine(lambda: weight.clone(), paths={}, **options)
    assert_fits(report)
    assert options or "such as reference=lambda x: x.dequantize()" in str(report)
    assert {"round_trip", "clone_and_detach"} <= {o.promise.name for o in report.of("kept")}
    assert "- metadata, nested_outside" in str(report)
    if options and version("torchao") == "0.18.0":  # of which the page tells
        assert tell_of_torchao() == (len(report.of("kept")), {o.promise.name for o in report.of("broken")})


def tell_of_torchao():
    """Returns how many promises torchao's class keeps, and the names of those that it breaks, by the page."""
    _, section = (ROOT / "docs/conformance.md").read_text().split("## torchao's `Int8Tensor`")
    kept, broken = re.search(r"finds (\d+) promises kept and (\d+) broken", section).groups()
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(names) == int(broken)
    return int(kept), names


# ---- the screen --------------------------------------------------------------------------------------------


def outcome(name, state, detail, mend="", error=None):
    promise = Promise(name, "It is so.", lambda s, case: None, mend="the usual")
    failures = (Failure(name, "", detail, "", "", mend, detail, error),) if error else ()
    return Outcome(promise, state, detail, mend, (), failures)


def test_promises_that_one_cause_breaks_are_one_entry():
    error = TypeError("unhashable")
    one, other = (outcome(n, "broken", f"{n} raised", "the usual", error) for n in "ab")
    third = outcome("c", "broken", "c is wrong", "mend c")
    lines = str(Report("X", (one, other, third))).splitlines()
    assert lines[0] == "X keeps 0 promises, breaks 3, 0 not tried"
    assert lines[1:5] == ["- a, b: a raised", "  mend: the usual", "- c: c is wrong", "  mend: mend c"]


def test_many_causes_still_fit_and_all_are_named():
    many = tuple(outcome(f"p{i}", "broken", "long " * 90, f"mend {i} " * 90) for i in range(30))
    report = Report("X", many)
    assert_fits(report)
    assert "- and p10, p11, p12" in str(report)


def test_what_was_not_tried_is_grouped_by_the_option_to_pass():
    skips = [
        ("a", "pass sizes=[...]"),
        ("b", "pass wrap=, which"),
        ("c", "pass sizes=[...]"),
        ("d", "no dtype"),
    ]
    text = str(Report("X", tuple(outcome(n, "skipped", why) for n, why in skips)))
    assert "not tried: pass sizes= for a, c; wrap= for b\nnot tried: d: no dtype\n" in text


# ---- refusals ----------------------------------------------------------------------------------------------


def with_exp(name, exp):
    return computes(name, {aten.exp.default: exp})


def asserts(x):
    assert x is None, "no exp"


# Raises on purpose.
Refusing = with_exp("Refusing", raising(TypeError("exp of a Refusing is not supported")))
Asserts = with_exp("Asserts", asserts)


@pytest.mark.slow
def test_what_a_class_raises_itself_is_a_refusal():
    assert outcome_of(of_tensors(Refusing, (4, 6)), "values").state == "kept"
    report = examine(lambda: Refusing(torch.randn(4, 6)), paths={})
    assert ": x.exp(): exp of a Refusing is not supported" in report.details()


test_an_accident_is_no_refusal = finding(
    {
        cls.__name__: ("values", of_tensors(cls, (4, 6)), ["x.exp() raised", *words])
        for cls, words in (
            (with_exp("Accident", lambda x: x + None), []),
            (with_exp("InsideTorch", lambda x: torch.ones(2) @ torch.ones(3)), []),
            (with_exp("Silent", raising(ValueError())), []),
            # An assertion is to become a refusal.
            (Asserts, ["An assert does not refuse"]),
        )
    }
)
