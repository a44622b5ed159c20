"""The goals of eager mode: what a declaration may cost beside a class written by hand and beside `TwoTensor`.

`test_layers.py` prints the times; here each goal is a ratio of two that were measured in turns.
"""

from __future__ import annotations

import pytest
import torch

from bench.layers import make_calls
from bench.timing import time_side_by_side

# what is done, on what, at most how many times the cost of what
GOALS = [
    ("x * 2", "declared", 1.25, "leanest by hand"),
    ("x * 2", "declared", 0.22, "TwoTensor"),
    ("unflatten", "declared", 1.6, "bare wrapper"),
    ("unflatten", "declared", 0.5, "TwoTensor"),
]


@pytest.fixture(scope="module")
def timings():
    calls = make_calls()
    wanted = {(done, subject) for done, mine, _, other in GOALS for subject in (mine, other)}
    with torch.no_grad():
        return time_side_by_side({key: calls[key] for key in calls if key in wanted}, rounds=60)


@pytest.mark.parametrize(("done", "subject", "most", "beside"), GOALS)
def test_goal(timings, done, subject, most, beside):
    # The lower quartile: what else runs on the machine only ever adds.
    ratio = timings[done, subject].low / timings[done, beside].low
    print(f"{done}: {subject} / {beside} = {ratio:.2f}, goal {most}")
    assert ratio <= most
