"""The ring buffer: it reads as a list that forgets, one program serves all positions."""

from __future__ import annotations

import copy

import pytest
import torch

import desugar
from classes import ring_buffer as example
from classes.ring_buffer import RingBuffer
from subclasses import DispatchError
from subclasses.testing import suite


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
    gradients = [torch.autograd.grad(v.pow(3).sum(), (storage, entries)) for v in (got, expected)]
    torch.testing.assert_close(*gradients)


def test_a_gradient_is_never_lost_in_silence():
    entry = torch.randn(6, requires_grad=True)
    learned = RingBuffer(torch.randn(4, 6, requires_grad=True), count=1)
    for refused in (lambda: make().append_(entry), lambda: learned.append_(entry.detach())):
        with pytest.raises(RuntimeError, match="append_ takes no gradients; use append"):
            refused()
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
    for size in ((), (0,), (0, 3)):
        with pytest.raises(ValueError, match="needs a capacity of 1 or more"):
            RingBuffer(torch.zeros(size))
    buffer = make()
    before = buffer.storage.clone()
    with pytest.raises(RuntimeError, match="expand"):
        buffer.append(torch.ones(2, 6))
    for refused in (lambda: buffer + 1, lambda: buffer.mul_(2), lambda: buffer[0], lambda: buffer.sum()):
        with pytest.raises(DispatchError, match="RingBuffer has no rule for aten"):
            refused()
    assert torch.equal(buffer.storage, before)


def test_the_script(capsys):
    example.main()
    out = capsys.readouterr().out
    assert "held [96.0, 97.0, 98.0, 99.0], mean 97.5" in out
