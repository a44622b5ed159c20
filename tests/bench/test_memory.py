"""What is counted as kept is what is kept."""

from __future__ import annotations

import sys

import pytest
import torch

from bench import memory

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the C library")


@linux
def test_an_instance_is_as_large_as_what_it_holds(monkeypatch):
    monkeypatch.setattr(memory, "INSTANCES", 500)
    found = memory.bytes_per_instance(lambda: bytearray(1000))
    assert 1000 <= found["Python"] < 1200
    tensor = torch.empty(0)
    found = memory.bytes_per_instance(tensor.detach)
    assert 50 < found["C++"] < 1000


@pytest.mark.parametrize("kept", [0, 100])
def test_growth_is_what_calls_keep(monkeypatch, kept):
    monkeypatch.setattr(memory, "CALLS", 200)
    hoard = []

    def way(fn):
        def call(*args):
            hoard.extend(bytearray(1000) for _ in range(kept // 100))
            return fn(*args)

        return call

    grown = memory.growth_over_calls(way, grad=True)
    assert len(grown) == memory.BLOCKS
    assert (min(grown) > 1000 * 200) == bool(kept)
