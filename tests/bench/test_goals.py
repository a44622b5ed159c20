"""The table of goals says what results say."""

from __future__ import annotations

import pytest

from bench import goals
from bench.report import Row, save_rows
from bench.timing import Timing


def row(group, name, median, **ratios):
    return Row(group, name, Timing(median, median, median), ratios)


def wrapper_rows(direct):
    rows = []
    for count in (1, 5, 20):
        for mode in goals.MODES:
            for kind in ("plain", "TwoTensor", "declared"):
                for way in (goals.STOCK, goals.BACKEND, goals.DIRECT):
                    median = count * (direct if way == goals.DIRECT and kind != "plain" else 10.0)
                    ratios = {
                        "/ stock, TwoTensor": median / count / 30,
                        "/ stock, plain": median / count / 10,
                    }
                    rows.append(row(f"{mode}, N = {count}", f"{kind}, {way}", median, **ratios))
    return rows


@pytest.mark.parametrize(("direct", "reached"), [(7.0, True), (13.0, False)])
def test_wrappers(tmp_path, direct, reached, monkeypatch):
    save_rows(wrapper_rows(direct), {"torch": "2.13.0"}, tmp_path / "wrappers.json")
    found = {goal.name: goal for goal in goals.find_goals(tmp_path)}
    assert (
        found["growth per wrapped argument over two plain ones, training, declared"].measured == direct / 10
    )
    assert all(goal.is_reached for goal in found.values()) == reached
    monkeypatch.setattr("sys.argv", ["goals", str(tmp_path)])
    assert goals.main() == (0 if reached else 1)
    assert ("missed" in (tmp_path / "goals.md").read_text()) != reached


def test_other_releases_have_other_goals(tmp_path):
    save_rows(wrapper_rows(13.0), {"torch": "2.15.0+cu132"}, tmp_path / "wrappers.json")
    found = {goal.name: goal for goal in goals.find_goals(tmp_path)}
    assert found["desugar.compile, N = 20 / stock on the 40 plain tensors, inference"].wanted == 1.3


def test_more_is_better_for_the_seed_table(tmp_path):
    rows = [row("in isolation, 5 arguments", "isinstance loop", 1.0, **{"/ generated": 5.4})]
    save_rows(rows, {"torch": "2.13.0"}, tmp_path / "seed.json")
    (goal,) = goals.find_goals(tmp_path)
    assert not goal.is_reached
    assert goal.wanted == 5.5


def test_an_empty_folder_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["goals", str(tmp_path)])
    with pytest.raises(SystemExit):
        goals.main()
    assert str(tmp_path) in capsys.readouterr().err
