"""The table of goals reports the figures of saved results."""

import pytest

from bench import floor, goals, int8_sizes, long_rows, memory, modules
from bench.gpu.report import OF_BUCKETS, OF_FILL, OF_FLOOR
from bench.gpu.stages import calls, int8, model, padded, training
from bench.gpu.table import BY_NAME
from bench.regressions import compare_runs, main
from bench.report import Row, load_rows, save_rows
from bench.timing import Timing


def row(group, name, median, ratios=None, unit=Row.unit):
    return Row(group, name, Timing(median, median, median), ratios or {}, unit)


def rows_of(groups, names, good, bad, *columns):
    """Rows of a run that reaches all goals by its ratios in these columns, and of one that misses all."""

    def rows(is_good):
        ratios = dict.fromkeys(columns, good if is_good else bad)
        return [row(group, name, 1.0, ratios) for group in groups for name in names]

    return rows


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


def floor_rows(good):
    slopes = ((floor.FLOOR, 1.0 if good else 1.5), (floor.PLAIN, 1.2), (goals.DIRECT, 9.0))
    return [
        row(f"inference, N = {count}", name, 2.0 + slope * count)
        for count in (1, 5, 20)
        for name, slope in slopes
    ]


# More is better.
seed_rows = rows_of(["in isolation, 5 arguments"], ["isinstance loop"], 5.6, 5.4, "/ generated")


# The file, its rows, and how many goals they have: ours alone have some.
INT8_SIZES = [
    *(f"bfloat16, 4096 by 4096, batch {batch}, {mode}" for batch in (1, 16) for mode in goals.MODES),
    *("a decode step, bfloat16", "a decode step, float32", "bfloat16, 1024 by 1024, batch 1, inference"),
]
INT8_WAYS = [
    *(int8_sizes.PLAIN, "weight-only, torchao"),
    *("weight-only, desugar.compile", "dynamic, torch.compile"),
]
UNEVEN = rows_of(["training, 50% fill"], (model.JAGGED, model.NESTED), 1.1, 1.3, OF_FILL)


def int8_rows(limit):
    return lambda good: [
        row(
            f"int8, M = {m}, N = K = 4096",
            name,
            1.0,
            {f"/ {int8.PLAIN}": 0.55 if good else 0.6, limit: 0.9 if good else 0.7},
        )
        for m in (1, 16)
        for name in (int8.WEIGHT_ONLY, int8.DYNAMIC)
    ]


# The file, its rows, and how many goals they have: ours alone have some.
GOALS = {
    "wrappers": ("wrappers", wrapper_rows, None),
    "modules": (
        "modules",
        rows_of((*goals.OF_MODULES, "another"), (goals.STOCK, goals.DIRECT), 0.4, 0.9, "/ stock"),
        len(goals.OF_MODULES),
    ),
    "int8 sizes": (
        int8_sizes.NAME,
        rows_of(INT8_SIZES, INT8_WAYS, 0.3, 1.2, "/ floats", "/ torchao"),
        10,
    ),
    "long rows": (
        long_rows.NAME,
        rows_of(
            ["16 rows"],
            [*goals.LONG_ROWS, "dense table, eager", "JaggedTensor, eager"],
            *(0.29, 1.6),
            *("/ dense, eager", "/ dense, torch.compile"),
        ),
        len(goals.LONG_ROWS),
    ),
    "what each call keeps": (
        "memory",
        lambda good: [
            *(
                row(f"{memory.GROWTH}, training", name, 3000.0 if good else 80 * memory.CALLS)
                for name in (goals.STOCK, goals.DIRECT)
            ),
            row("one more program, training", goals.DIRECT, 1e6),
        ],
        1,
    ),
    "the growth of the floor": ("floor", floor_rows, 1),
    "the seed table": ("seed", seed_rows, 1),
    "int8 on a GPU": ("gpu-int8", int8_rows(OF_FLOOR), 2),
    "int8 on a GPU, by the limit": ("gpu-int8", int8_rows("limit / this"), 2),
    "padded on a GPU": (
        "gpu-padded",
        lambda good: [
            *(
                row(padded.group_of(1), name, 1.0, {f"/ {padded.DYNAMIC}": 0.3 if good else 0.35})
                for name in (padded.BUCKETS, padded.NO_GRAPHS)
            ),
            *(
                row(
                    f"{padded.group_of(1)}: {unit}",
                    padded.BUCKETS,
                    number,
                    {OF_BUCKETS: number / 4},
                    unit,
                )
                for unit, number in ((padded.PROGRAMS, 4), (padded.GRAPHS_RECORDED, 4 if good else 0))
            ),
        ],
        2,
    ),
    "training on a GPU": (
        "gpu-training",
        rows_of(
            ["training, 2048 wide, 32,768 tokens", "training, 1024 wide, 4,452 tokens"],
            (training.JAGGED, training.FLEX),
            *(1.0, 1.1),
            f"/ {training.BY_HAND}",
        ),
        1,
    ),
    "uneven rows on a GPU": ("gpu-rows", UNEVEN, 1),
    "the model on a GPU": ("gpu-model", UNEVEN, 1),
    "events on a GPU": (
        "gpu-events",
        lambda good: [
            line
            for name, amount in {
                "plain, desugar.compile": 4,
                "declared, desugar.compile": 4 if good else 5,
            }.items()
            for line in (
                row("training, N = 20", name, 1.0),
                row("cudaEventRecord in a training step", name, amount, unit=calls.CALLS),
            )
        ],
        1,
    ),
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


# ---- rows that a comparison with a saved run reports as worse -------------------------------------------------------

MACHINE = {"cpu": "made up", "cores": 2}


def row_regressions(median, spread=1.0, name="declared", *, ratio=0.5, ours=True):
    return Row("group", name, Timing(median, median - spread, median + spread), {"/ stock": ratio}, ours=ours)


@pytest.mark.parametrize(
    ("before", "after", "verdict", "by_ratio"),
    [
        (row_regressions(3), row_regressions(0, spread=0), "better", False),  # a count that goes to none
        (row_regressions(100), row_regressions(100), "", False),
        (row_regressions(100), row_regressions(150), "worse", False),
        (row_regressions(100, spread=60), row_regressions(150), "noise", False),  # within the old spread
        (row_regressions(100), row_regressions(150, spread=60), "noise", False),  # within the new spread
        (row_regressions(100), row_regressions(60, spread=60), "noise", False),
        (
            row_regressions(100, spread=0.1),
            row_regressions(105, spread=0.1),
            "",
            False,
        ),  # sure, but less than a tenth
        (row_regressions(100), row_regressions(60), "better", False),
        (row_regressions(100, name="another"), row_regressions(100), "new", False),
        (
            row_regressions(100),
            row_regressions(300, spread=3),
            "",
            True,
        ),  # ratios are compared across machines
        (row_regressions(100), row_regressions(100, ratio=0.7), "worse", True),
    ],
)
def test_verdict(before, after, verdict, by_ratio):
    (change,) = compare_runs([before], [after], by_ratio=by_ratio)
    assert change.verdict == verdict and (after.timing.median or change.growth == 0)


@pytest.mark.parametrize(
    ("after", "machine", "status"),
    [
        (row_regressions(100), MACHINE, 0),
        (row_regressions(200), MACHINE, 1),
        (row_regressions(200, ours=False), MACHINE, 0),
        (row_regressions(200), {**MACHINE, "cpu": "another"}, 0),
        (row_regressions(200, ratio=1.0), {**MACHINE, "cpu": "another"}, 1),
    ],
)
def test_exit_status(tmp_path, capsys, after, machine, status):
    save_rows([row_regressions(100, ours=after.ours)], MACHINE, tmp_path / "old.json")
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
        save_rows([row_regressions(median)], MACHINE, tmp_path / folder / "b.json")
        save_rows([row_regressions(100)], MACHINE, tmp_path / folder / "a.json")
    save_rows([row_regressions(100)], MACHINE, tmp_path / "old" / "vanished.json")
    assert main([str(tmp_path / "old"), str(tmp_path / "new")]) == 1
    shown = capsys.readouterr().out
    assert "a.json: 0 of our figures worse" in shown and "b.json: 1 of our figures worse" in shown
    assert main([str(tmp_path), str(tmp_path / "new")]) == 2
    assert "make bench" in capsys.readouterr().err


def test_rows_come_back(tmp_path):
    save_rows([row_regressions(100)], MACHINE, tmp_path / "a.json")
    assert load_rows(tmp_path / "a.json") == ([row_regressions(100)], MACHINE)
    assert "| declared | 100.00 ± 1.00 | 0.50 |" in (tmp_path / "a.md").read_text()
