"""The benchmark of DTensors compares what it times, on ranks that do not talk."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench import dtensors, goals
from bench.timing import Timing


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=dtensors.RANKS)
    yield dist.init_device_mesh("cpu", (dtensors.RANKS,))
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_all_ways_give_the_same(mesh, mode, monkeypatch):
    for fn, args, wanted in dtensors.make_cases(mesh).values():
        call = dtensors.in_inference(fn, args)
        if mode == "training":
            call = dtensors.in_training(fn, args, wanted)
        dtensors.check_equal({"eager": call, "again": call})
        with pytest.raises(AssertionError):
            dtensors.check_equal({"eager": call, "wrong": lambda: torch.full((3,), 7.0)})


def test_every_case_has_a_goal(mesh, monkeypatch):
    monkeypatch.setattr(dtensors, "WAYS", {way: lambda fn: fn for way in dtensors.WAYS})
    monkeypatch.setattr(
        dtensors, "time_side_by_side", lambda calls: dict.fromkeys(calls, Timing(2.0, 2.0, 2.0))
    )
    found = list(goals._dtensors(dtensors.measure()))
    assert len(found) == 2 * len(dtensors.make_cases(mesh))
    assert all(goal.measured == 1 and goal.wanted == 0.3 for goal in found)
