"""A fault whose error tells its cause gets the advice that mends it, whichever promise met it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses import TensorSubclass, inner
from subclasses.testing import PATHS
from subclasses.testing.faults import mend_of
from tests.subclasses.subjects import declare
from tests.subclasses.testing.faults import outcomes

aten = torch.ops.aten
TABLE = torch.linspace(-1, 1, 16)


class Table(TensorSubclass, size_from="index", dtype_from="scale", fallback="materialize"):
    """Reads a tensor of the module."""

    index: Tensor = inner(dtype=torch.int64)
    scale: Tensor = inner()

    def materialize(self):
        return TABLE[self.index] * self.scale


Held = declare(materialize=lambda self: self.held)


def only_left(func, x, y):
    return type(x)(func(x.held, y))


def without_out(func, x, y):
    return func(*(getattr(t, "held", t) for t in (x, y)))


LeftOnly = declare(Held, name="LeftOnly", rules={aten.mul.Tensor: only_left})
NoOut = declare(Held, name="NoOut", rules={torch.mul: without_out})


def advice(factory, *promises, **options):
    found = outcomes(factory, *promises, **options)
    assert all(found[name].state == "broken" for name in promises), found
    return [found[name].mend for name in promises]


def test_a_tensor_of_the_module_is_named():
    mends = advice(
        lambda: Table(torch.randint(0, 16, (4, 6)), torch.rand(4, 1)),
        "compiled_values",
        "compiled_views",
        paths=PATHS,
    )
    for mend in mends:
        assert "neither an operand nor an inner tensor (TABLE, which Table.materialize (" in mend
        assert "declare it as a constant of the class, with constant(), or as a field, with inner()" in mend


def test_a_rule_that_knows_the_left_operand_only():
    for mend in advice(lambda: LeftOnly(torch.randn(4, 6)), "values", "stale_gradients"):
        assert mend.startswith("only_left (") and "reads .held of an operand without a test" in mend
        assert "any operand is a LeftOnly, the right one too" in mend


def error_of(call):
    with pytest.raises((AttributeError, TypeError)) as caught:
        call()
    return caught.value


def test_a_rule_without_a_parameter_that_callers_pass():
    x = NoOut(torch.randn(2, 2))
    mend = mend_of(error_of(lambda: torch.mul(x, 2, out=x)), NoOut)
    assert mend.startswith("without_out (") and "takes no out=, which callers may pass" in mend


def test_the_cause_is_found_behind_other_errors():
    error = RuntimeError("a compiler failed")
    error.__cause__ = error_of(lambda: torch.ones(2, 2) * LeftOnly(torch.randn(2, 2)))
    assert mend_of(error, LeftOnly).startswith("only_left (")


@pytest.mark.parametrize(
    "error",
    [
        None,
        ValueError("other"),
        AttributeError("no object"),
        TypeError("f() got"),
        error_of(lambda: torch.ones(1).held),  # outside of the rules
        error_of(lambda: F.relu(torch.ones(1), out=None)),
    ],
)
def test_any_other_error_has_no_cause(error):
    assert mend_of(error, LeftOnly) is None
