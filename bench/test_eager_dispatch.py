"""Goals of eager mode: the cost of a declared class relative to a hand-written class and to `TwoTensor`.

`test_layers.py` prints the times. Here each goal is a ratio of two times that are measured in turns.
"""

from __future__ import annotations

import pytest
import torch

from bench.layers import make_calls, make_reads
from bench.timing import time_side_by_side

# operation, class, largest ratio, class to divide by
GOALS = [
    ("x * 2", "declared", 1.25, "leanest by hand"),
    ("x * 2", "declared", 0.22, "TwoTensor"),
    ("unflatten", "declared", 1.6, "bare wrapper"),
    ("unflatten", "declared", 0.5, "TwoTensor"),
]


# What a read of an inner tensor, or the method that the author wrote, costs over the least that it can.
READS = [
    ("x.unwrap('a'), with grad", "declared", 1.8, "bare function"),
    ("x.materialize(), without grad", "declared", 2.5, "two plain tensors"),
]


@pytest.fixture(scope="module")
def timings():
    calls = make_calls()
    compared = {(done, subject) for done, ours, _, other in GOALS for subject in (ours, other)}
    with torch.no_grad():
        return time_side_by_side({key: calls[key] for key in calls if key in compared}, rounds=60)


@pytest.mark.parametrize(("done", "subject", "most", "reference"), GOALS)
def test_goal(timings, done, subject, most, reference):
    # The lower quartile, since other work on the machine only adds time.
    ratio = timings[done, subject].low / timings[done, reference].low
    print(f"{done}: {subject} / {reference} = {ratio:.2f}, goal {most}")
    assert ratio <= most


@pytest.mark.parametrize(("done", "subject", "most", "reference"), READS)
def test_reads(done, subject, most, reference):
    reads = {key: call for key, call in make_reads().items() if key[0] == done}
    with torch.set_grad_enabled(done.endswith("with grad")):
        timings = time_side_by_side(reads, rounds=60)
    ratio = timings[done, subject].low / timings[done, reference].low
    print(f"{done}: {timings[done, subject].low:.2f} us, {subject} / {reference} = {ratio:.2f}, goal {most}")
    assert ratio <= most
