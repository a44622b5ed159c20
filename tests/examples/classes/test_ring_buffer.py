"""The ring buffer: it reads as a list that forgets, one program serves all positions."""

from __future__ import annotations

import copy

import pytest
import torch

import desugar
from classes.ring_buffer import RingBuffer
from subclasses import DispatchError
from subclasses.testing import suite
from tests.examples.classes.checks import check_gradients, converted, refused


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
        return RingBuffer(storage, count=4).append(entries[0]).append(entries[1]).read()

    expected = torch.stack([storage[0], entries[0], entries[1]])
    check_gradients(way(function)(storage, entries), expected, (storage, entries), lambda v: v.pow(3).sum())


def test_few_programs_serve_all_positions():
    step = desugar.compile(lambda buffer, entry: buffer.append(entry), backend="eager")
    buffer = make(5, 0)
    for i in range(30):
        buffer = step(buffer, torch.full((6,), float(i)))
    assert buffer.read()[:, 0].tolist() == [25, 26, 27, 28, 29]
    assert len(step.programs) <= 3  # for 0, for 1, and for the rest


def test_copies_and_entries_keep_the_position():
    for buffer in (make(), copy.deepcopy(make()), make().clone(), make().long()):
        entry = torch.ones(6, dtype=buffer.dtype)
        assert buffer.count == 9 and buffer.append(entry).read()[-1].tolist() == [1] * 6
    learned = RingBuffer(torch.randn(4, 6, requires_grad=True), count=1)
    assert learned.detach().append_(torch.zeros(6)).count == 2


ENTRY = torch.randn(6, requires_grad=True)
LEARNED = torch.randn(4, 6, requires_grad=True)
test_conversions = converted([make], [torch.bfloat16, torch.int64], lambda x: [x.read()])
test_what_is_refused = refused(
    [make],
    {
        "no capacity": (
            ValueError,
            "needs a capacity of 1 or more",
            [lambda x, size=size: RingBuffer(torch.zeros(size)) for size in ((), (0,), (0, 3))],
        ),
        "two entries": (RuntimeError, "expand", [lambda x: x.append(torch.ones(2, 6))]),
        # A gradient is never lost in silence.
        "gradients": (
            RuntimeError,
            "append_ takes no gradients; use append",
            [lambda x: x.append_(ENTRY), lambda x: RingBuffer(LEARNED, count=1).append_(ENTRY.detach())],
        ),
        "ops without a rule": (
            DispatchError,
            "RingBuffer has no rule for aten",
            [lambda x: x + 1, lambda x: x.mul_(2), lambda x: x[0], lambda x: x.sum()],
        ),
    },
)
