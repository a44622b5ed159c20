"""Starts are made in fresh processes, with the cache directory and the switch that the row names."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import goals, one_start, starts
from bench.report import save_rows


@pytest.fixture
def processes(monkeypatch):
    """The processes that a benchmark starts; none runs, and each start takes as long as the environment sets."""
    made = []

    def run(command, *, env, **kwargs):
        seconds = {
            "wall": 2.0 + 2.0 * (any(env.get(switch) == "0" for switch in starts.SWITCHES)),
            "cpu": 1.0,
            "graph": 0.5,
            "imports": 3.0,
            "collecting": 0.5,
        }
        given = [json.loads(Path(path).read_text()) for path in command[5:]]
        made.append((command[3:5], env, given))
        seconds["modules"] = [f"module{len(made)}"]
        found = dict.fromkeys(one_start.PACKAGES, seconds) if command[3] == "imports" else seconds
        return subprocess.CompletedProcess(command, 0, "a line of a compiler\n" + json.dumps(found), "")

    monkeypatch.setattr(starts.subprocess, "run", run)
    return made


def test_a_warm_start_has_the_directory_that_a_cold_one_left(processes):
    ways = starts.ways_of("both")
    starts.measure_starts(3, list(one_start.CASES)[:2], ways)
    assert len(processes) == (1 + 3) * 2 * len(ways) * 2
    cold, warm = processes[::2], processes[1::2]
    for (arguments, environment, _), (again, same, _) in zip(cold, warm, strict=True):
        assert arguments == again and environment == same
    folders = [environment["TORCHINDUCTOR_CACHE_DIR"] for _, environment, _ in cold]
    assert len(set(folders)) == len(folders)
    assert not any(os.path.exists(folder) for folder in folders)


def test_each_start_imports_before_what_its_like_imported_in_the_first_turn(processes):
    ways = starts.ways_of("on")
    starts.measure_starts(2, ["x * 2, training"], ways)
    first = {n: pair for n, (pair, _, given) in enumerate(processes) if not given}
    assert len(first) == 2 * len(ways)
    for n, (pair, _, given) in enumerate(processes):
        if given:
            ((name,),) = given
            found = int(name.removeprefix("module")) - 1
            assert first[found] == pair and found % 2 == n % 2  # cold ones are even
    processes.clear()
    starts.measure_starts(2, ["x * 2, training"], ways, lazy=True)
    assert len(processes) == (1 + 2) * 2 * 3
    assert not any(given for *_, given in processes), "a lazy start imports where it needs to"


@pytest.mark.parametrize("store", ["on", "off", "both"])
def test_rows(processes, store, monkeypatch):
    monkeypatch.setenv(starts.SWITCHES[1], "0")  # no row counts a variable that is set outside
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    case, ways = "x * 2, training", starts.ways_of(store)
    rows = starts.rows_of(starts.measure_starts(2, [case], ways), [case], ways)
    assert len(rows) == 2 * len(starts.CLOCKS) * len(ways)
    assert not any("PYTHONDONTWRITEBYTECODE" in environment for _, environment, _ in processes)
    for row in rows:
        is_wall = row.group.endswith("wall")
        is_stored = is_wall and starts.OFF not in row.name
        wanted = {"/ stock": 2 if is_wall and starts.OFF in row.name else 1}
        wanted |= {starts.WITHOUT: 0.5 if is_stored else 1} if store == "both" else {}
        wanted |= {} if store == "on" else {starts.ALIKE: 1}
        assert row.ratios == wanted
        assert row.ours == (row.name.removesuffix(starts.OFF) != starts.STOCK)


def test_goals(processes, tmp_path):
    ways, cases = starts.ways_of("both"), list(one_start.CASES)
    rows = starts.measure_imports(2) + starts.rows_of(starts.measure_starts(2, cases, ways), cases, ways)
    save_rows(rows, {"torch": "2.13.0"}, tmp_path / "starts.json")
    found = {goal.name: goal for goal in goals.find_goals(tmp_path)}
    assert goals.WARM_STARTS.keys() == set(cases)
    assert len(found) == len(goals.IMPORT_SECONDS) + 5 * len(cases)
    assert found["import desugar, seconds over torch"].measured == 2
    assert found["import desugar, subclasses.ragged, seconds over torch"].measured == 4
    assert not found["desugar.compile / stock, warm start, 20 ops, training"].is_reached
    assert found[
        "desugar.compile, with the store / without the store, cold start, 20 ops, training"
    ].is_reached


@pytest.mark.slow
def test_a_process_that_fails_is_told():
    with pytest.raises(RuntimeError, match=r"(?s)no case desugar.compile failed:.*KeyError: 'no case'"):
        starts.run_process(["no case", "desugar.compile"], starts.ROOT)


def test_the_clock_counts_children_that_still_run():
    clock = one_start.Clock()
    busy = "import sys\nfor _ in range(10**7): pass\nprint(1, flush=True)\nsys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "1\n"
        running = clock.read()
        child.communicate("")
    ended = clock.read()
    assert 0.05 < running["cpu"] <= ended["cpu"] + 0.02
    assert ended["cpu"] < running["cpu"] + 1 and ended["wall"] > running["wall"]


@pytest.mark.parametrize("case", one_start.CASES)
def test_cases_and_what_is_checked(case, monkeypatch):
    """Every case runs in every way with its own check; one that computes something else fails it."""
    monkeypatch.setattr(one_start, "_compile", lambda way, fn: fn)
    threads = torch.get_num_threads()
    try:
        seconds = one_start.measure_start(case, one_start.STOCK)
        assert 0 < seconds["wall"] < 60
        monkeypatch.setattr(one_start, "_compile", lambda way, fn: lambda *args: fn(*args) * 1.5)
        with pytest.raises(AssertionError, match="are not close"):
            one_start.measure_start(case, one_start.STOCK)
    finally:
        torch.set_num_threads(threads)


def test_imports():
    one_start._import_all(["no.module.of.this.name", "colorsys"])  # a missing module is left out
    assert "colorsys" in sys.modules
    code = (
        "import sys, bench.one_start; print([m for m in ('torch', 'desugar', 'numpy') if m in sys.modules])"
    )
    run = functools.partial(subprocess.run, cwd=starts.ROOT, capture_output=True, text=True, check=True)
    assert run([sys.executable, "-c", code]).stdout.strip() == "[]"  # they are measured without our own
