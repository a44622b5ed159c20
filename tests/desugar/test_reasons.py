"""Why a program was compiled is logged: which guard failed, by the user's names, with both values."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from tests.desugar.classes import Labeled, Pair, make
from tests.desugar.judge import by_pass


def reasons(caplog, compiled, *calls):
    """What the logger says of each program."""
    with caplog.at_level(logging.INFO, logger="desugar"):
        for args in calls:
            compiled(*args)
    return [r.getMessage() for r in caplog.records if r.name == "desugar" and r.levelno == logging.INFO]


ONE = torch.ones(2)


def labeled(label):
    return Labeled(ONE.clone(), ONE.clone(), label=label)


FAILURES = {
    "size": ((ONE,), (torch.ones(3),), "x.size(0): expected 2, got 3"),
    "dtype": ((ONE,), (ONE.double(),), "x.dtype: expected float32, got float64"),
    "gradient": ((ONE,), (ONE.clone().requires_grad_(),), "x.requires_grad: expected False, got True"),
    "class": ((make(Pair, 2),), (ONE,), "x"),
    "an int": ((ONE, 3), (ONE, 4), "y: expected 3, got 4"),
    "a text": ((ONE, "a"), (ONE, "b"), "y: expected 'a', got 'b'"),
    "a flag": ((ONE, True), (ONE, False), "y: expected True, got False"),
    "metadata of a wrapper": ((labeled("a"),), (labeled("b"),), "x"),
    "size of an inner tensor": ((make(Pair, 4),), (make(Pair, 5),), "expected 4, got 5"),
    "dtype of an inner tensor": (
        (make(Pair, 5),),
        (make(Pair, 5, dtype=torch.float64),),
        "expected float32, got float64",
    ),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", FAILURES)
def test_the_guard_that_failed_is_named(name, caplog):
    first, second, says = FAILURES[name]
    compiled = by_pass(lambda x, y=2: x * (y if isinstance(y, int) else len(y)))
    one, other = reasons(caplog, compiled, first, second)
    assert one.endswith("first call") and "program 1 of test_the_guard" in one
    assert "program 2" in other and says in other


def test_attributes_of_modules_are_named(caplog):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.by, self.drop = 2.5, nn.Dropout(0.0)

        def forward(self, x):
            return self.drop(x) * int(self.by)

    module = Scale()
    compiled = by_pass(module)
    reasons(caplog, compiled, (ONE,))
    module.by = 3.5
    assert "by" in reasons(caplog, compiled, (ONE,))[-1] and "3.5" in caplog.text
    module.eval()
    assert "training" in reasons(caplog, compiled, (ONE,))[-1]


def test_another_mode_is_named(caplog):
    compiled = by_pass(lambda x: x * 2)
    reasons(caplog, compiled, (ONE,))
    with torch.no_grad():
        last = reasons(caplog, compiled, (ONE,))[-1]
    assert "program 2" in last and "gradients: expected on, got off" in last


def test_nothing_is_run_to_find_it(caplog):
    def grow(x, by):
        x.add_(by)
        return x * 1

    compiled, x = by_pass(grow), torch.zeros(2)
    reasons(caplog, compiled, (x, 1), (x, 2))
    assert x.tolist() == [3, 3] and x._version == 2
