"""Which line is named for what only the end of a run shows."""

from __future__ import annotations

import gc
import sys
from types import FunctionType

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import desugar
from desugar import DesugarError


def where(fn, *args):
    with pytest.raises(DesugarError) as caught:
        desugar.compile(fn, backend="eager")(*args)
    assert caught.value.where in str(caught.value)
    return caught.value.where


def store(held, x):
    held.append(x)  # the inner line


def test_a_line_of_a_function_that_it_calls_is_named():
    def fn(held, x):
        store(held, x * 2)
        return x + 1

    assert where(fn, [], torch.ones(2)).endswith("held.append(x)  # the inner line")


def test_a_line_that_changes_after_its_calls_have_returned_is_named():
    def double(x):
        return x * 2

    def fn(held, x):
        held["y"] = double(x)  # the outer line
        return x + 1

    assert where(fn, {}, torch.ones(2)).endswith("# the outer line")


def test_a_line_inside_of_modules_and_checkpoints_is_named():
    class Resizing(nn.Module):
        def forward(self, x):
            x.resize_(4)  # in a module
            return x * 2

    assert where(Resizing(), torch.ones(2)).endswith("# in a module")

    def fn(held, x):
        def part(y):
            held.append(1)  # in a checkpoint
            return y.sin()

        return checkpoint(part, x, use_reentrant=False)

    assert where(fn, [], torch.ones(2)).endswith("# in a checkpoint")


def test_with_a_debugger_the_function_itself_is_named():
    def fn(held, x):
        held.append(x)
        return x + 1

    def trace(frame, event, argument):
        return None

    sys.settrace(trace)
    try:
        found = where(fn, [], torch.ones(2))
        assert sys.gettrace() is trace
    finally:
        sys.settrace(None)
    assert found.endswith("def fn(held, x)")


def test_the_trace_function_is_gone_afterwards_and_the_next_call_works():
    def fn(held, x):
        if len(held) == 1:
            held.append(x)
        return x + 1

    compiled = desugar.compile(fn, backend="eager")
    held = [torch.ones(2)]
    with pytest.raises(DesugarError):
        compiled(held, torch.ones(2))
    assert sys.gettrace() is None and len(held) == 1
    assert torch.equal(compiled([], torch.ones(2)), torch.full((2,), 2.0))


def test_an_argument_of_the_failed_call_is_not_kept_alive():
    import gc
    import weakref

    def fn(held, x):
        held.append(x)
        return x + 1

    compiled, x = desugar.compile(fn, backend="eager"), torch.ones(2)
    alive = weakref.ref(x)
    with pytest.raises(DesugarError):
        compiled([], x)
    del x
    gc.collect()
    assert alive() is None


@pytest.fixture
def collecting_often():
    """Garbage is collected all the time, and each time a function is told that is of no library of ours."""
    told = FunctionType((lambda phase, info: None).__code__.replace(co_filename="/elsewhere/told.py"), {})
    thresholds = gc.get_threshold()
    gc.callbacks.append(told)
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*thresholds)
    gc.callbacks.remove(told)


def test_what_the_garbage_collector_calls_is_no_line_of_the_function(collecting_often):
    def changes(held, x):
        held.append([[] for _ in range(50)])  # the container's line
        return [x + 1, [[] for _ in range(50)]]

    kept = []

    def keeps(x):
        if not kept:
            kept.append(x * 2)
        return x + kept[0]  # returned here

    assert where(changes, [], torch.ones(2)).endswith("# the container's line")
    assert where(keeps, torch.ones(2)).endswith("# returned here")
    assert gc.isenabled()
