"""How often a function is run for a trace: once in inference, unless it returns a view."""

from __future__ import annotations

import pytest
import torch

from subclasses import inner
from tests.desugar.judge import by_pass
from tests.subclasses.subjects import declare

RUNS: list[int] = []


def counted(func, x):
    RUNS.append(1)
    return type(x)(x.numbers * 2)


Counted = declare(name="Counted", numbers=inner(), rules={torch.sin: counted})

# The function, and how often it runs where gradients are off; Dynamo runs it once.
CASES = {
    "an op": (lambda x: x.sin().numbers, 1),
    "a write": (lambda x: x.numbers.add_(1) + x.sin().numbers, 1),
    "a result that is an argument": (lambda x: (x.sin().numbers, x.numbers)[0], 1),
    "a view of a result": (lambda x: x.sin().numbers[1:], 1),
    "a view of an argument": (lambda x: (x.sin().numbers, x.numbers[1:])[1], 3),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_runs_where_gradients_are_off(name, dynamic):
    fn, wanted = CASES[name]
    compiled, x, y = by_pass(fn, dynamic=dynamic), Counted(torch.ones(3)), Counted(torch.ones(3))
    with torch.no_grad():
        for size in (3, 3, 4):
            x, y = Counted(torch.ones(size)), Counted(torch.ones(size))
            expected = fn(y)
            RUNS.clear()
            torch.testing.assert_close(compiled(x), expected)
            torch.testing.assert_close(x.numbers, y.numbers)
            assert len(RUNS) in (0, 1 + wanted)


def test_both_runs_where_a_result_has_a_gradient():
    counts = []
    for grad in (True, False):
        compiled, w = by_pass(lambda x, w: x.sin().numbers * w), torch.ones(3, requires_grad=True)
        RUNS.clear()
        with torch.set_grad_enabled(grad):
            compiled(Counted(torch.ones(3)), w)
        counts.append(len(RUNS))
    assert counts == [3, 2]
