"""Which check a call fails, in words; a call that fits is not run."""

from __future__ import annotations

import sys

import pytest
import torch

import desugar
from desugar.misses import find_miss
from tests.desugar.classes import Labeled, Pair


def grow(x, y):
    x.add_(1)
    return x + y


def program_for(*args, fn=lambda x, y: x + y):
    compiled = desugar.compile(fn, backend="eager")
    compiled(*args)
    return compiled.programs[0]


ONE, PAIR = torch.ones(2), Pair(torch.ones(2), torch.ones(2))
MISSES = [
    ((ONE, ONE.clone()), (torch.ones(3), ONE), "tensor 'a0' size mismatch at index 0. expected 2, actual 3"),
    ((ONE, ONE.clone()), (ONE, ONE.double()), "tensor 'a1' dtype mismatch. expected Float, actual Double"),
    ((ONE, ONE.clone()), (ONE,), "len(args) != 2"),
    ((ONE, 3), (ONE, 4), "not (type(a1) is kind and a1 == constant)"),
    ((PAIR, ONE), (ONE, ONE.clone()), "type(a0) is not Pair"),
    ((ONE, ONE), (ONE, ONE.clone()), "a1 is not a0"),
]


@pytest.mark.parametrize(("traced", "called", "says"), MISSES)
def test_the_failed_check_is_named(traced, called, says):
    assert find_miss(program_for(*traced), called, {}) == says


def test_layouts_are_shown():
    one, other = (Labeled(torch.ones(2), torch.ones(2), label=label) for label in ("a", "b"))
    said = find_miss(program_for(one, 2, fn=lambda x, y: x * y), (other, 2), {})
    assert said.startswith("layout of a0: expected Layout(Labeled") and "('a',)" in said and "('b',)" in said


def test_modes_are_named():
    program = program_for(ONE, ONE.clone())
    with torch.no_grad():
        assert find_miss(program, (ONE, ONE.clone()), {}) == "another mode: grad_mode"


def test_a_call_that_fits_is_not_run():
    x = torch.zeros(2)
    program = program_for(x, torch.ones(2), fn=grow)
    x.zero_()
    version = x._version
    assert find_miss(program, (x, torch.ones(2)), {}) is None
    assert not x.any() and x._version == version


def test_a_debugger_stays_in_place():
    program, seen = program_for(ONE, ONE.clone()), []

    def trace(frame, event, argument):
        seen.append(event)

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        find_miss(program, (ONE,), {})
        assert sys.gettrace() is trace
    finally:
        sys.settrace(earlier)
