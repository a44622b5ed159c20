"""Which tensors share memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from desugar.ir.storage import are_apart, base_of, may_overlap, storage_of, whole_storage
from tests.desugar.classes import Pair, make


@given(st.data())
def test_ranges(data):
    """Never apart where two tensors have a byte in common."""
    buffer = torch.zeros(24)

    def part():
        rows, cols = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
        strides = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 2))
        return buffer.as_strided((rows, cols), strides, data.draw(st.integers(0, 8)))

    one, other = part(), part()
    places = torch.arange(24.0)
    seen = [
        {*places.as_strided(t.size(), t.stride(), t.storage_offset()).flatten().tolist()}
        for t in (one, other)
    ]
    assert may_overlap(one, other) == may_overlap(other, one)
    assert may_overlap(one, other) or not seen[0] & seen[1]


BUFFER, DOUBLES = torch.zeros(8), torch.zeros(4, dtype=torch.float64)
HALVES = DOUBLES.view(torch.float32)


@pytest.mark.parametrize(
    ("one", "other", "may"),
    [
        (BUFFER[:4], BUFFER[4:], False),
        (BUFFER[::2], BUFFER[1::2], True),  # by ranges: may
        (BUFFER, BUFFER.clone(), False),
        (BUFFER[:0], BUFFER, False),
        (BUFFER, BUFFER.view(torch.int32)[3:4], True),
        # Offsets are in elements of each tensor's own size.
        (DOUBLES[2:3], HALVES[4:5], True),
        (DOUBLES[1:2], HALVES[4:5], False),
    ],
)
def test_side_by_side_and_elsewhere(one, other, may):
    assert may_overlap(one, other) is may


def test_bases():
    x = torch.ones(2, 3)
    assert base_of(x) is x and base_of(x[0]) is x and base_of(x[0][1]) is x
    assert base_of(x.detach()) is not x and storage_of(x.detach()) == storage_of(x)
    w = make(Pair, 2, 3)
    assert storage_of(w.view(-1)) == storage_of(w) != storage_of(w.clone())


X = torch.ones(4)


@pytest.mark.parametrize(
    ("written", "others", "apart"),
    [
        ((X,), (BUFFER,), True),
        ((X[:2],), (X[1:],), False),
        ((X[:2],), (X[2:],), True),
        ((X[:2], X[1:]), (), False),
        ((), (X[1:], X), True),  # reading alone does no harm
    ],
)
def test_apart(written, others, apart):
    assert are_apart(written, others) is apart


def test_the_whole_storage():
    x = torch.arange(12.0)[3:9].view(2, 3).t().requires_grad_()
    whole = whole_storage(x)
    assert whole.tolist() == list(range(12)) and not whole.requires_grad and not whole._is_view()
    assert storage_of(whole) == storage_of(x)
