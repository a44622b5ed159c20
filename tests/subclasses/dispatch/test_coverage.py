"""What coverage says is what dispatch does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from subclasses import Coverage, SpecError, TensorSubclass, coverage, inner
from subclasses.dispatch.coverage import KINDS
from subclasses.dispatch.resolution import choose_plan
from tests.subclasses.subjects import Hostile, Int8Weight, Pair

aten = torch.ops.aten


class Ruled(TensorSubclass, decompose=[aten.silu]):
    held: Tensor = inner()


Ruled.implements(aten.add.Tensor)(lambda func, x, y: x)
Ruled.implements(torch.Tag.pointwise)(lambda func, x, *rest: x)


def test_every_op_of_aten_is_there_once():
    found = coverage(Pair)
    assert isinstance(found, Coverage)
    assert len(found.steps) > 2000 and sum(found.counts.values()) == len(found.steps)
    assert {"aten.add.Tensor", "aten.add_.Tensor", "aten.linear.default"} <= found.steps.keys()
    assert "aten.empty.memory_format" not in found.steps  # takes no tensor


def test_each_kind():
    steps = coverage(Ruled).steps
    assert steps["aten.add.Tensor"] == "rule"
    assert steps["aten.add_.Tensor"] == "derived from aten.add.Tensor (rule)"
    assert steps["aten.detach.default"] == "structure"
    assert steps["aten.cos.default"] == "tag rule"
    assert steps["aten.cos_.default"] == "derived from aten.cos.default (tag rule)"
    assert steps["aten.linear.default"] == "decomposition"
    assert steps["aten.mm.default"] == "error"
    assert coverage(Pair).steps["aten.mm.default"] == "map"
    assert coverage(Int8Weight).steps["aten.mm.default"] == "materialize"


def test_an_explicit_decomposition():
    class Some(TensorSubclass, decompose=[aten.addcmul]):
        held: Tensor = inner()

    steps = coverage(Some).steps
    assert (steps["aten.addcmul.default"], steps["aten.addcdiv.default"]) == ("decomposition", "error")


def test_two_equally_specific_rules_are_shown():
    class Torn(Ruled):
        pass

    Torn.implements(torch.Tag.core)(lambda func, x, *rest: x)
    assert coverage(Torn).steps["aten.sin.default"] == "ambiguous"
    assert coverage(Ruled).counts.get("ambiguous") is None


@pytest.mark.sweep(4)
@pytest.mark.parametrize("op", [aten.add.Tensor, aten.mm.default, aten.detach.default, aten.cos_.default])
@pytest.mark.parametrize("cls", [Ruled, Pair, Int8Weight, Hostile])
def test_it_is_what_dispatch_does(cls, op):
    assert coverage(cls).steps[str(op)] == choose_plan(cls, op).name


def test_the_text():
    found = coverage(Ruled)
    lines = str(found).splitlines()
    assert lines[0] == f"Ruled: {len(found.steps)} ops of aten"
    assert lines[1].split() == ["rule", str(found.counts["rule"])]
    assert lines[2].strip() == "add.Tensor"
    assert list(found.counts) == [k for k in KINDS if k in found.counts]


def test_asking_for_one_kind():
    found = coverage(Ruled)
    assert found.ops("rule") == ["aten.add.Tensor"]
    with pytest.raises(ValueError, match="expected a kind of step in"):
        found.ops("rules")


def test_no_plan_is_compiled_for_it():
    class Quiet(TensorSubclass, fallback="map"):
        held: Tensor = inner()

    import linecache

    before = len(linecache.cache)
    coverage(Quiet)
    assert len(linecache.cache) == before


@pytest.mark.parametrize("wrong", [Tensor, int, "Pair"])
def test_a_class_that_was_not_declared(wrong):
    with pytest.raises(SpecError, match=r"coverage\(\) takes a class declared with TensorSubclass"):
        coverage(wrong)
