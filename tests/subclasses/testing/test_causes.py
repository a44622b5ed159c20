"""A fault whose error tells its cause gets the advice that mends it, whichever promise met it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses import TensorSubclass, inner
from subclasses.testing import examine
from subclasses.testing.faults import mend_of
from subclasses.testing.runner import PROMISES

aten = torch.ops.aten
TABLE = torch.linspace(-1, 1, 16)


class Table(TensorSubclass, size_from="index", dtype_from="scale", fallback="materialize"):
    """Reads a tensor of the module."""

    index: Tensor = inner(dtype=torch.int64)
    scale: Tensor = inner()

    def materialize(self):
        return TABLE[self.index] * self.scale


class LeftOnly(TensorSubclass):
    """Its rule knows the left operand only."""

    held: Tensor = inner()

    def materialize(self):
        return self.held


@LeftOnly.implements(aten.mul.Tensor)
def only_left(func, x, y):
    return LeftOnly(func(x.held, y))


class NoOut(TensorSubclass):
    """Its rule for a function lacks a parameter."""

    held: Tensor = inner()

    def materialize(self):
        return self.held


@NoOut.implements(torch.mul)
def without_out(func, x, y):
    return NoOut(func(*(t.held if isinstance(t, NoOut) else t for t in (x, y))))


def advice(factory, *promises, **options):
    others = {p.name for p in PROMISES} - {*promises, "readable"}
    report = examine(factory, **{"skip": others, **options})
    found = {o.promise.name: o.mend for o in report.of("broken")}
    assert set(promises) <= set(found), f"broken: {list(found)}"
    return [found[name] for name in promises]


def test_a_tensor_of_the_module_is_named():
    mends = advice(
        lambda: Table(torch.randint(0, 16, (4, 6)), torch.rand(4, 1)), "compiled_values", "compiled_views"
    )
    for mend in mends:
        assert "neither an operand nor an inner tensor (TABLE, which Table.materialize (" in mend
        assert "declare it as a constant of the class, with constant(), or as a field, with inner()" in mend


def test_a_rule_that_knows_the_left_operand_only():
    for mend in advice(lambda: LeftOnly(torch.randn(4, 6)), "values", "stale_gradients", paths={}):
        assert mend.startswith("only_left (") and "reads .held of an operand without a test" in mend
        assert "any operand is a LeftOnly, the right one too" in mend


def test_a_rule_without_a_parameter_that_callers_pass():
    x = NoOut(torch.randn(2, 2))
    with pytest.raises(TypeError) as caught:
        torch.mul(x, 2, out=x)
    assert mend_of(caught.value, NoOut).startswith("without_out (")
    assert "takes no out=, which callers may pass" in mend_of(caught.value, NoOut)


def test_the_cause_is_found_behind_other_errors():
    with pytest.raises(AttributeError) as caught:
        torch.ones(2, 2) * LeftOnly(torch.randn(2, 2))
    error = RuntimeError("a compiler failed")
    error.__cause__ = caught.value
    assert mend_of(error, LeftOnly).startswith("only_left (")


@pytest.mark.parametrize(
    "error", [None, ValueError("other"), AttributeError("no object"), TypeError("f() got")]
)
def test_any_other_error_has_no_cause(error):
    assert mend_of(error, LeftOnly) is None


def test_an_error_of_a_call_outside_of_the_rules_has_no_cause():
    with pytest.raises(AttributeError) as caught:
        torch.ones(1).held
    assert mend_of(caught.value, LeftOnly) is None
    with pytest.raises(TypeError) as caught:
        F.relu(torch.ones(1), out=None)
    assert mend_of(caught.value, LeftOnly) is None
