"""What a comparison with a saved run calls worse, on made-up runs."""

from __future__ import annotations

import pytest

from bench.regressions import compare_runs, main
from bench.report import Row, load_rows, save_rows
from bench.timing import Timing

MACHINE = {"cpu": "made up", "cores": 2}


def row(median, spread=1.0, name="declared", *, ratio=0.5, ours=True):
    return Row("group", name, Timing(median, median - spread, median + spread), {"/ stock": ratio}, ours=ours)


@pytest.mark.parametrize(
    ("before", "after", "verdict", "by_ratio"),
    [
        (row(3), row(0, spread=0), "better", False),  # a count that goes to none
        (row(100), row(100), "", False),
        (row(100), row(150), "worse", False),
        (row(100, spread=60), row(150), "noise", False),  # within that of the old run
        (row(100), row(150, spread=60), "noise", False),  # within that of the new one
        (row(100), row(60, spread=60), "noise", False),
        (row(100, spread=0.1), row(105, spread=0.1), "", False),  # sure, but less than a tenth
        (row(100), row(60), "better", False),
        (row(100, name="another"), row(100), "new", False),
        (row(100), row(300, spread=3), "", True),  # ratios are compared across machines
        (row(100), row(100, ratio=0.7), "worse", True),
    ],
)
def test_verdict(before, after, verdict, by_ratio):
    (change,) = compare_runs([before], [after], by_ratio=by_ratio)
    assert change.verdict == verdict and (after.timing.median or change.growth == 0)


@pytest.mark.parametrize(
    ("after", "machine", "status"),
    [
        (row(100), MACHINE, 0),
        (row(200), MACHINE, 1),
        (row(200, ours=False), MACHINE, 0),
        (row(200), {**MACHINE, "cpu": "another"}, 0),
        (row(200, ratio=1.0), {**MACHINE, "cpu": "another"}, 1),
    ],
)
def test_exit_status(tmp_path, capsys, after, machine, status):
    save_rows([row(100, ours=after.ours)], MACHINE, tmp_path / "old.json")
    save_rows([after], machine, tmp_path / "new.json")
    assert main([str(tmp_path / "old.json"), str(tmp_path / "new.json")]) == status
    assert f"{status} of our figures worse" in capsys.readouterr().out


def test_no_saved_run(tmp_path, capsys):
    (tmp_path / "a.json").write_text("{}")
    assert main([str(tmp_path / "a.json")]) == 2
    assert main([str(tmp_path / "missing.json")]) == 2
    assert "make bench" in capsys.readouterr().err


def test_folders(tmp_path, capsys):
    for folder, median in (("old", 100), ("new", 200)):
        save_rows([row(median)], MACHINE, tmp_path / folder / "b.json")
        save_rows([row(100)], MACHINE, tmp_path / folder / "a.json")
    save_rows([row(100)], MACHINE, tmp_path / "old" / "vanished.json")
    assert main([str(tmp_path / "old"), str(tmp_path / "new")]) == 1
    shown = capsys.readouterr().out
    assert "a.json: 0 of our figures worse" in shown and "b.json: 1 of our figures worse" in shown
    assert main([str(tmp_path), str(tmp_path / "new")]) == 2
    assert "make bench" in capsys.readouterr().err


def test_rows_come_back(tmp_path):
    save_rows([row(100)], MACHINE, tmp_path / "a.json")
    assert load_rows(tmp_path / "a.json") == ([row(100)], MACHINE)
    assert "| declared | 100.00 ± 1.00 | 0.50 |" in (tmp_path / "a.md").read_text()
