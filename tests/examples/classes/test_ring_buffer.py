"""The ring buffer: it reads as a list that forgets, one program serves all positions."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

import desugar
from classes.ring_buffer import RingBuffer
from subclasses import DispatchError
from subclasses.testing import suite
from tests.examples.classes.checks import check_gradients, check_refused, check_unchanged


def make(capacity=4, count=9):
    return RingBuffer(torch.randn(capacity, 6), count=count)


TestRingBuffer = suite(
    make, sizes=[lambda: make(5, 11), lambda: make(7, 3)], variants=[lambda: make(count=2)]
)


@pytest.mark.sweep(10)
@pytest.mark.parametrize("capacity", [1, 3])
@pytest.mark.parametrize("append", ["append", "append_"])
def test_it_reads_as_a_list_that_forgets(way, append, capacity):
    def step(buffer, entry):
        buffer = getattr(buffer, append)(entry)
        return buffer, buffer.read()

    step, buffer, entries = way(step), RingBuffer(torch.zeros(capacity, 2)), []
    assert buffer.read().shape == (0, 2)
    for _ in range(7):
        entries.append(torch.randn(2))
        buffer, held = step(buffer, entries[-1])
        assert torch.equal(held, torch.stack(entries[-capacity:]))
    assert buffer.count == 7


def test_append_leaves_the_buffer_as_it_was():
    buffer = make()
    before = buffer.read()
    other = buffer.append(torch.ones(6))
    assert torch.equal(buffer.read(), before)
    assert torch.equal(other.read(), torch.cat([before[1:], torch.ones(1, 6)]))
    shared = buffer.append_(torch.ones(6))
    assert shared.storage.data_ptr() == buffer.storage.data_ptr()
    assert torch.equal(shared.read(), other.read())


def test_gradients(way):
    storage, entries = torch.randn(3, 2, requires_grad=True), torch.randn(2, 2, requires_grad=True)

    def function(storage, entries):
        buffer = RingBuffer(storage, count=4)
        return buffer.append(entries[0]).append(entries[1]).read()

    got = way(function)(storage, entries)
    expected = torch.stack([storage[0], entries[0], entries[1]])
    assert torch.equal(got, expected)
    check_gradients(got, expected, (storage, entries), lambda v: v.pow(3).sum())


def test_a_gradient_is_never_lost_in_silence():
    entry = torch.randn(6, requires_grad=True)
    learned = RingBuffer(torch.randn(4, 6, requires_grad=True), count=1)
    calls = lambda: make().append_(entry), lambda: learned.append_(entry.detach())
    check_refused(*calls, error=RuntimeError, match="append_ takes no gradients; use append")
    with torch.no_grad():
        assert learned.detach().append_(torch.zeros(6)).count == 2


def test_few_programs_serve_all_positions():
    step = desugar.compile(lambda buffer, entry: buffer.append(entry), backend="eager")
    buffer = make(5, 0)
    for i in range(30):
        buffer = step(buffer, torch.full((6,), float(i)))
    assert buffer.read()[:, 0].tolist() == [25, 26, 27, 28, 29]
    assert len(step.programs) <= 3  # for 0, for 1, and for the rest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_conversions_and_copies_keep_the_position(dtype):
    buffer = make().to(dtype)
    for other in (buffer, copy.deepcopy(buffer), buffer.clone()):
        assert other.dtype == other.read().dtype == dtype and other.count == 9
    assert buffer.append(torch.ones(6, dtype=dtype)).read()[-1].tolist() == [1] * 6


def test_what_is_refused():
    empty = (partial(RingBuffer, torch.zeros(size)) for size in ((), (0,), (0, 3)))
    check_refused(*empty, error=ValueError, match="needs a capacity of 1 or more")
    x = make()
    check_unchanged([x.storage], lambda: x.append(torch.ones(2, 6)), error=RuntimeError, match="expand")
    ops = lambda: x + 1, lambda: x.mul_(2), lambda: x[0], lambda: x.sum()
    check_unchanged([x.storage], *ops, error=DispatchError, match="RingBuffer has no rule for aten")
