"""The answer to whether compiling was worth it."""

from __future__ import annotations

import pytest

from desugar.compare.records import Verdict
from desugar.compare.replay.worth import sum_up

RIGHT = {"torch.compile": Verdict("right"), "desugar.compile": Verdict("right")}


def summed(eager, stock, ours, verdicts=RIGHT, *more):
    return sum_up(2, (("eager", eager), ("torch.compile", stock), ("desugar.compile", ours)), verdicts, *more)


@pytest.mark.parametrize(
    ("times", "says"),
    [
        ((4.0, 2.0, 1.0), "yes, 4 times faster than eager, 2 times faster than torch.compile"),
        ((1.0, 2.0, 4.0), "no, 4 times slower than eager, 2 times slower than torch.compile"),
        ((1.0, 1e-4, 1.03), "hardly, as fast as eager, 10,300 times slower than torch.compile"),
        ((1.0, None, 0.5), "yes, 2 times faster than eager"),
        ((1.0, 1.0, None), "no, desugar.compile failed"),
    ],
)
def test_the_answer(times, says):
    assert summed(*times).answer == says


def test_what_is_wrong_was_not_worth_it():
    wrong = {**RIGHT, "desugar.compile": Verdict("wrong", "call 1 of 2: off")}
    found = summed(4.0, 2.0, 1.0, wrong, "2 programs together")
    assert found.answer == "no, desugar.compile does not do what eager mode does"
    assert found.verdict == (
        "2 calls compared; torch.compile: right; desugar.compile: wrong (call 1 of 2: off); 2 programs together"
    )
