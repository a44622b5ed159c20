"""The report of `coverage` agrees with dispatch."""

import linecache

import pytest
import torch
from torch import Tensor

from subclasses import Coverage, SpecError, coverage
from subclasses.dispatch.coverage import KINDS
from subclasses.dispatch.resolution import resolve
from tests.subclasses.subjects import Hostile, Int8Weight, Pair, declare
from tests.tables import raising

aten = torch.ops.aten


Ruled = declare(
    name="Ruled",
    keywords={"decompose": [aten.silu]},
    rules={
        aten.add.Tensor: lambda func, x, y: x,
        torch.Tag.pointwise: lambda func, x, *rest: x,
    },
)


def test_every_op_of_aten_is_there_once():
    found = coverage(Pair)
    assert isinstance(found, Coverage)
    assert len(found.steps) > 2000 and sum(found.counts.values()) == len(found.steps)
    assert {"aten.add.Tensor", "aten.add_.Tensor", "aten.linear.default"} <= found.steps.keys()
    assert "aten.empty.memory_format" not in found.steps  # takes no tensor


Some = declare(keywords={"decompose": [aten.addcmul]})
STEPS = {
    (Ruled, "aten.add.Tensor"): "rule",
    (Ruled, "aten.add_.Tensor"): "derived from aten.add.Tensor (rule)",
    (Ruled, "aten.detach.default"): "inners",
    (Ruled, "aten.cos.default"): "tag rule",
    (Ruled, "aten.cos_.default"): "derived from aten.cos.default (tag rule)",
    (Ruled, "aten.linear.default"): "decomposition",
    (Ruled, "aten.mm.default"): "error",
    (Pair, "aten.mm.default"): "map",
    (Int8Weight, "aten.mm.default"): "materialize",
    (Int8Weight, "aten.mul.out"): "materialize",
    (Int8Weight, "aten.cos_.default"): "refused",
    (Int8Weight, "aten.rrelu_with_noise.default"): "refused",
    (Some, "aten.addcmul.default"): "decomposition",
    (Some, "aten.addcdiv.default"): "error",
}


def test_each_kind():
    assert {(cls, op): coverage(cls).steps[op] for cls, op in STEPS} == STEPS


def test_two_equally_specific_rules_are_shown():
    Torn = declare(Ruled, rules={torch.Tag.core: lambda func, x, *rest: x})
    assert coverage(Torn).steps["aten.sin.default"] == "ambiguous"
    assert coverage(Ruled).counts.get("ambiguous") is None


@pytest.mark.sweep(4)
@pytest.mark.parametrize("op", [aten.add.Tensor, aten.mm.default, aten.detach.default, aten.cos.out])
@pytest.mark.parametrize("cls", [Ruled, Pair, Int8Weight, Hostile])
def test_it_is_what_dispatch_does(cls, op):
    assert coverage(cls).steps[str(op)] == resolve(cls, op).name


def test_the_text():
    found = coverage(Ruled)
    lines = str(found).splitlines()
    assert lines[0] == f"Ruled: {len(found.steps)} ops of aten"
    assert [lines[1].split(), lines[2].strip()] == [["rule", str(found.counts["rule"])], "add.Tensor"]
    assert str(coverage(Int8Weight)).splitlines()[-1].strip() == " ".join(coverage(Int8Weight).functions)
    assert list(found.counts) == [k for k in KINDS if k in found.counts]
    assert found.ops("rule") == ["aten.add.Tensor"] and lines[-1].split() == ["functions", "0"]


def test_no_plan_is_compiled_for_it():
    Quiet, before = declare(keywords={"fallback": "map"}), len(linecache.cache)
    coverage(Quiet)
    assert len(linecache.cache) == before


test_what_is_refused = raising(
    {
        "a kind": (lambda: coverage(Ruled).ops("rules"), ValueError, "expected a kind of step in"),
        **{
            str(wrong): (
                lambda wrong=wrong: coverage(wrong),
                SpecError,
                r"coverage\(\) takes a class declared with TensorSubclass",
            )
            for wrong in (Tensor, int, "Pair")
        },
    }
)
