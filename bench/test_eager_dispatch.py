"""Goals of eager mode: the cost of a declared class relative to a hand-written class and to `TwoTensor`.

`test_layers.py` prints the times. Here each goal is a ratio of two times that are measured in turns.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bench.layers import SHAPE, make_calls, make_reads
from bench.timing import time_side_by_side
from subclasses import TensorSubclass, inner

# operation, class, largest ratio, class to divide by
GOALS = [
    ("x * 2", "declared", 1.25, "leanest by hand"),
    ("x * 2", "declared", 0.22, "TwoTensor"),
    ("unflatten", "declared", 1.6, "bare wrapper"),
    ("unflatten", "declared", 0.5, "TwoTensor"),
]


# The time of a read of an inner tensor, or of a method of the author, over the least that it can take.
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


class Scaled(TensorSubclass):
    """A structure with a rule, which runs above autograd where gradients are recorded."""

    a: Tensor = inner()
    b: Tensor = inner()


def multiply(x: Scaled, y: Scaled) -> Scaled:
    """Computes with inner tensors, as a user may without a rule."""
    (a, b), (c, d) = x.unwrap(), y.unwrap()
    return Scaled(a * c, b * d)


Scaled.implements(torch.ops.aten.mul.Tensor)(lambda func, x, y: Scaled(x.a * y.a, x.b * y.b))

# A rule, over the same computation by `unwrap`: a forward, and a forward of 20 products with its backward.
MOST = {"forward": 2.3, "forward and backward": 2.0}


@pytest.mark.parametrize("done", MOST)
def test_a_rule_where_gradients_are_recorded(done):
    x, y = (Scaled(torch.rand(SHAPE), torch.rand(SHAPE)).requires_grad_() for _ in range(2))

    def run(product):
        z = x
        for _ in range(1 if done == "forward" else 20):
            z = product(z, y)
        if done != "forward":
            z.unwrap("a").sum().backward()

    calls = {"rule": lambda: run(torch.mul), "by hand": lambda: run(multiply)}
    timings = time_side_by_side(calls, rounds=60)
    ratio = timings["rule"].low / timings["by hand"].low
    print(f"{done}: {timings['rule'].low:.1f} us, rule / by hand = {ratio:.2f}, goal {MOST[done]}")
    assert ratio <= MOST[done]
