"""Every signature has a program of its own before anything is timed."""

from __future__ import annotations

import torch

import desugar
from bench import programs


@torch.no_grad()
def test_cells_and_programs(monkeypatch):
    made = []

    def way(fn):
        made.append(desugar.compile(fn, backend="eager", dynamic=False))
        return made[-1]

    monkeypatch.setattr(programs, "WAYS", {"desugar.compile": way})
    monkeypatch.setattr(programs, "PROGRAMS", (1, 3))
    calls = programs.make_calls(2)
    titles = [title for title, _ in calls]
    assert titles == ["one program", "3 programs, one of them", "3 programs, in turn"]
    assert [len(fn.programs) for fn in made] == [1, 3, 3]
    before = [fn.programs for fn in made]
    sizes = {title: [tuple(call()[0].shape) for _ in range(4)] for (title, _), call in calls.items()}
    assert sizes == {
        "one program": [(8, 2)] * 4,
        "3 programs, one of them": [(8, 2)] * 4,
        "3 programs, in turn": [(8, 2), (8, 3), (8, 4), (8, 2)],
    }
    assert [len(fn.programs) for fn in made] == [len(known) for known in before]
