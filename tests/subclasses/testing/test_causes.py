"""A fault whose error tells its cause gets the advice that mends it, whichever promise met it."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from subclasses.testing.faults import mend_of
from tests.subclasses.subjects import declare
from tests.subclasses.testing.faults import finding, of_tensors

aten = torch.ops.aten


Held = declare(materialize=lambda self: self.held)


def only_left(func, x, y):
    return type(x)(func(x.held, y))


def without_out(func, x, y):
    return func(*(getattr(t, "held", t) for t in (x, y)))


LeftOnly = declare(Held, name="LeftOnly", rules={aten.mul.Tensor: only_left})
NoOut = declare(Held, name="NoOut", rules={torch.mul: without_out})


test_a_rule_that_knows_the_left_operand_only = finding(
    {
        promise: (
            promise,
            of_tensors(LeftOnly, (4, 6)),
            [
                "only_left (",
                "reads .held of an operand without a test",
                "any operand is a LeftOnly, the right one too",
            ],
        )
        for promise in ("values", "stale_gradients")
    }
)


def error_of(call):
    with pytest.raises((AttributeError, TypeError)) as caught:
        call()
    return caught.value


def caused_by(error):
    caused = RuntimeError("a compiler failed")
    caused.__cause__ = error
    return caused


ONES = torch.ones(2, 2)
# An error, the class, and a pattern of the cause, which the last have not.
ERRORS = {
    "a parameter that callers pass": (
        error_of(lambda: torch.mul(NoOut(ONES), 2, out=NoOut(ONES))),
        NoOut,
        r"without_out \(.*takes no out=, which callers may pass",
    ),
    "behind another error": (caused_by(error_of(lambda: ONES * LeftOnly(ONES))), LeftOnly, r"only_left \("),
    "no error": (None, LeftOnly, None),
    "another value": (ValueError("other"), LeftOnly, None),
    "no object": (AttributeError("no object"), LeftOnly, None),
    "no parameter": (TypeError("f() got"), LeftOnly, None),
    "outside of the rules": (error_of(lambda: ONES.held), LeftOnly, None),
    "another function": (error_of(lambda: F.relu(ONES, out=None)), LeftOnly, None),
}


@pytest.mark.parametrize("case", ERRORS)
def test_the_cause_that_an_error_tells(case):
    error, cls, words = ERRORS[case]
    found = mend_of(error, cls)
    assert found is words is None or re.match(words, found)
