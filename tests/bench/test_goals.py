"""The table of goals says what results say."""

from __future__ import annotations

import pytest

from bench import floor, goals, int8_sizes, long_rows, memory, modules
from bench.gpu.report import OF_BUCKETS, OF_FILL, OF_FLOOR
from bench.gpu.stages import calls, int8, model, padded, training
from bench.gpu.table import BY_NAME
from bench.report import Row, save_rows
from bench.timing import Timing


def row(group, name, median, ratios=None, unit=Row.unit):
    return Row(group, name, Timing(median, median, median), ratios or {}, unit)


# ---- rows of a run that reaches all goals, and of one that misses all ------------------------------------------


def wrapper_rows(good):
    return [
        row(
            f"{mode}, N = {count}",
            f"{kind}, {way}",
            count * each,
            {"/ stock, TwoTensor": each / 30, "/ stock, plain": each / 10},
        )
        for count in (1, 5, 20)
        for mode in goals.MODES
        for kind in ("plain", "TwoTensor", "declared")
        for way in (goals.STOCK, goals.BACKEND, goals.DIRECT)
        for each in [(5.0 if good else 13.0) if way == goals.DIRECT and kind != "plain" else 10.0]
    ]


def module_rows(good):
    names = (*goals.OF_MODULES, "another")
    ratios = {"/ stock": 0.4 if good else 0.9}
    return [row(name, way, 1.0, ratios) for name in names for way in (goals.STOCK, goals.DIRECT)]


def int8_size_rows(good):
    ratio = 0.3 if good else 1.2
    groups = [
        *(f"bfloat16, 4096 by 4096, batch {batch}, {mode}" for batch in (1, 16) for mode in goals.MODES),
        *("a decode step, bfloat16", "a decode step, float32", "bfloat16, 1024 by 1024, batch 1, inference"),
    ]
    names = [
        *(int8_sizes.PLAIN, "weight-only, torchao"),
        *("weight-only, desugar.compile", "dynamic, torch.compile"),
    ]
    ratios = {"/ floats": ratio, "/ torchao": ratio}
    return [row(group, name, 1.0, ratios) for group in groups for name in names]


def long_rows_rows(good):
    ratios = dict.fromkeys(("/ dense, eager", "/ dense, torch.compile"), 0.29 if good else 1.6)
    names = [*goals.LONG_ROWS, "dense table, eager", "JaggedTensor, eager"]
    return [row("16 rows", name, 1.0, ratios) for name in names]


def memory_rows(good):
    grown = 3000.0 if good else 80 * memory.CALLS
    rows = [row(f"{memory.GROWTH}, training", name, grown) for name in (goals.STOCK, goals.DIRECT)]
    return [*rows, row("one more program, training", goals.DIRECT, 1e6)]


def floor_rows(good):
    slopes = ((floor.FLOOR, 1.0 if good else 1.5), (floor.PLAIN, 1.2), (goals.DIRECT, 9.0))
    return [
        row(f"inference, N = {count}", name, 2.0 + slope * count)
        for count in (1, 5, 20)
        for name, slope in slopes
    ]


def seed_rows(good):
    ratios = {"/ generated": 5.6 if good else 5.4}  # more is better
    return [row("in isolation, 5 arguments", "isinstance loop", 1.0, ratios)]


def int8_rows(good, limit=OF_FLOOR):
    plain = f"/ {int8.PLAIN}"
    ratios = {plain: 0.55, limit: 0.9} if good else {plain: 0.6, limit: 0.7}
    names = int8.WEIGHT_ONLY, int8.DYNAMIC
    return [row(f"int8, M = {m}, N = K = 4096", name, 1.0, ratios) for m in (1, 16) for name in names]


def padded_rows(good):
    group = padded.group_of(1)
    rows = [
        row(group, name, 1.0, {f"/ {padded.DYNAMIC}": 0.3 if good else 0.35})
        for name in (padded.BUCKETS, padded.NO_GRAPHS)
    ]
    counts = ((padded.PROGRAMS, 4), (padded.GRAPHS_RECORDED, 4 if good else 0))
    return rows + [
        row(f"{group}: {unit}", padded.BUCKETS, number, {OF_BUCKETS: number / 4}, unit)
        for unit, number in counts
    ]


def training_rows(good):
    ratios = {f"/ {training.BY_HAND}": 1.0 if good else 1.1}
    groups = ["training, 2048 wide, 32,768 tokens", "training, 1024 wide, 4,452 tokens"]
    return [row(group, name, 1.0, ratios) for group in groups for name in (training.JAGGED, training.FLEX)]


def uneven_rows(good):
    ratios = {OF_FILL: 1.1 if good else 1.3}
    return [row("training, 50% fill", name, 1.0, ratios) for name in (model.JAGGED, model.NESTED)]


def event_rows(good):
    amounts = {"plain, desugar.compile": 4, "declared, desugar.compile": 4 if good else 5}
    return [row("training, N = 20", name, 1.0) for name in amounts] + [
        row("cudaEventRecord in a training step", name, amount, unit=calls.CALLS)
        for name, amount in amounts.items()
    ]


# The file, its rows, and how many goals they have: ours alone have some.
GOALS = {
    "wrappers": ("wrappers", wrapper_rows, None),
    "modules": ("modules", module_rows, len(goals.OF_MODULES)),
    "int8 sizes": (int8_sizes.NAME, int8_size_rows, 10),
    "long rows": (long_rows.NAME, long_rows_rows, len(goals.LONG_ROWS)),
    "what each call keeps": ("memory", memory_rows, 1),
    "the growth of the floor": ("floor", floor_rows, 1),
    "the seed table": ("seed", seed_rows, 1),
    "int8 on a GPU": ("gpu-int8", int8_rows, 2),
    "int8 on a GPU, by the limit": ("gpu-int8", lambda good: int8_rows(good, "limit / this"), 2),
    "padded on a GPU": ("gpu-padded", padded_rows, 2),
    "training on a GPU": ("gpu-training", training_rows, 1),
    "uneven rows on a GPU": ("gpu-rows", uneven_rows, 1),
    "the model on a GPU": ("gpu-model", uneven_rows, 1),
    "events on a GPU": ("gpu-events", event_rows, 1),
}


@pytest.mark.parametrize("case", GOALS)
def test_good_figures_reach_the_goals_and_others_miss_them(tmp_path, case):
    name, rows, count = GOALS[case]
    for good in (True, False):
        save_rows(rows(good), {"torch": "2.13.0"}, tmp_path / f"{name}.json")
        found = list(goals.find_goals(tmp_path))
        if count is None:
            assert all(goal.is_reached for goal in found) == good
        else:
            assert [goal.is_reached for goal in found] == [good] * count


@pytest.mark.parametrize("good", [True, False])
def test_the_page_and_the_status_say_whether_goals_are_missed(tmp_path, good, monkeypatch):
    save_rows(wrapper_rows(good), {"torch": "2.13.0"}, tmp_path / "wrappers.json")
    found = {goal.name: goal.measured for goal in goals.find_goals(tmp_path)}
    name = "growth per wrapped argument over two plain ones, training, declared"
    assert found[name] == (0.5 if good else 1.3)
    monkeypatch.setattr("sys.argv", ["goals", str(tmp_path)])
    assert goals.main() == (0 if good else 1)
    assert ("missed" in (tmp_path / "goals.md").read_text()) != good


def test_figures_of_goals(tmp_path):
    for name, rows in (("floor", floor_rows), ("seed", seed_rows)):
        save_rows(rows(False), {"torch": "2.15.0"}, tmp_path / f"{name}.json")
    of_floor, of_seed = sorted(goals.find_goals(tmp_path), key=lambda goal: goal.wanted)
    assert of_floor.measured == pytest.approx(1.25) and of_seed.wanted == 5.5
    events = goals.Goal("events", 4, 3, exactly=True)  # fewer than plain are not as many
    assert not events.is_reached and events.cells()[1] == "exactly 4"


def test_an_empty_folder_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["goals", str(tmp_path)])
    with pytest.raises(SystemExit):
        goals.main()
    assert str(tmp_path) in capsys.readouterr().err


def test_what_has_goals_is_measured():
    assert set(goals.OF_MODULES) <= set(modules.SUBJECTS)
    read = {name.removeprefix("gpu-") for name in goals.READERS if name.startswith("gpu-")}
    assert read - {"rows"} <= BY_NAME.keys()  # the first run had a stage of that name
