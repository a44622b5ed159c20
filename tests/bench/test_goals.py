"""The table of goals says what results say."""

from __future__ import annotations

import pytest

from bench import floor, goals, int8_sizes, long_rows, memory, modules
from bench.gpu.report import OF_BUCKETS, OF_FILL, OF_FLOOR
from bench.gpu.stages import calls, int8, model, padded, training
from bench.gpu.table import BY_NAME
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


@pytest.mark.parametrize(("direct", "reached"), [(5.0, True), (13.0, False)])
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


@pytest.mark.parametrize(("ratio", "reached"), [(0.4, True), (0.9, False)])
def test_modules(tmp_path, ratio, reached):
    rows = [
        row(name, way, 1.0, **{"/ stock": ratio})
        for name in (*goals.OF_MODULES, "another")
        for way in (goals.STOCK, goals.DIRECT)
    ]
    save_rows(rows, {"torch": "2.13.0"}, tmp_path / "modules.json")
    found = list(goals.find_goals(tmp_path))
    assert [goal.is_reached for goal in found] == [reached] * len(goals.OF_MODULES)


@pytest.mark.parametrize(("ratio", "reached"), [(0.3, True), (1.2, False)])
def test_int8_sizes(tmp_path, ratio, reached):
    groups = [f"bfloat16, 4096 by 4096, batch {batch}, {mode}" for batch in (1, 16) for mode in goals.MODES]
    names = [
        int8_sizes.PLAIN,
        "weight-only, torchao",
        "weight-only, desugar.compile",
        "dynamic, torch.compile",
    ]
    ratios = {"/ floats": ratio, "/ torchao": ratio}
    rows = [
        row(group, name, 1.0, **ratios)
        for group in (
            *groups,
            "a decode step, bfloat16",
            "a decode step, float32",
            "bfloat16, 1024 by 1024, batch 1, inference",
        )
        for name in names
    ]
    save_rows(rows, {"torch": "2.13.0"}, tmp_path / f"{int8_sizes.NAME}.json")
    found = goals.find_goals(tmp_path)
    assert [goal.is_reached for goal in found] == [reached] * 10


@pytest.mark.parametrize(("ratio", "reached"), [(0.29, True), (1.6, False)])
def test_long_rows(tmp_path, ratio, reached):
    ratios = {"/ dense, eager": ratio, "/ dense, torch.compile": ratio}
    names = [*goals.LONG_ROWS, "dense table, eager", "JaggedTensor, eager"]
    save_rows(
        [row("16 rows", name, 1.0, **ratios) for name in names], {}, tmp_path / f"{long_rows.NAME}.json"
    )
    found = goals.find_goals(tmp_path)
    assert [goal.is_reached for goal in found] == [reached] * len(goals.LONG_ROWS)


def test_the_goals_of_modules_are_measured():
    assert set(goals.OF_MODULES) <= set(modules.SUBJECTS)


def test_more_is_better_for_the_seed_table(tmp_path):
    rows = [row("in isolation, 5 arguments", "isinstance loop", 1.0, **{"/ generated": 5.4})]
    save_rows(rows, {"torch": "2.13.0"}, tmp_path / "seed.json")
    (goal,) = goals.find_goals(tmp_path)
    assert not goal.is_reached
    assert goal.wanted == 5.5


@pytest.mark.parametrize(("grown", "reached"), [(3000.0, True), (80 * memory.CALLS, False)])
def test_what_each_call_keeps_is_noticed(tmp_path, grown, reached):
    group = f"{memory.GROWTH}, training"
    rows = [row(group, name, grown) for name in (goals.STOCK, goals.DIRECT)] + [
        row("one more program, training", goals.DIRECT, 1e6)
    ]
    save_rows(rows, {"torch": "2.13.0"}, tmp_path / "memory.json")
    (goal,) = goals.find_goals(tmp_path)
    assert goal.is_reached == reached


def test_the_growth_of_the_floor(tmp_path):
    rows = [
        row(f"inference, N = {count}", name, 2.0 + slope * count)
        for count in (1, 5, 20)
        for name, slope in ((floor.FLOOR, 1.5), (floor.PLAIN, 1.2), (goals.DIRECT, 9.0))
    ]
    save_rows(rows, {"torch": "2.15.0"}, tmp_path / "floor.json")
    (goal,) = goals.find_goals(tmp_path)
    assert goal.measured == pytest.approx(1.25) and not goal.is_reached


def test_an_empty_folder_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["goals", str(tmp_path)])
    with pytest.raises(SystemExit):
        goals.main()
    assert str(tmp_path) in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------
# what needs a GPU
# ---------------------------------------------------------------------------------------------------------


def count_row(group, name, amount, unit, ratios=None):
    return Row(group, name, Timing(amount, amount, amount), ratios or {}, unit)


def int8_rows(good, limit=OF_FLOOR):
    plain = f"/ {int8.PLAIN}"
    ratios = {plain: 0.55, limit: 0.9} if good else {plain: 0.6, limit: 0.7}
    names = int8.WEIGHT_ONLY, int8.DYNAMIC
    return [row(f"int8, M = {m}, N = K = 4096", name, 1.0, **ratios) for m in (1, 16) for name in names]


def padded_rows(good):
    group = padded.group_of(1)
    rows = [
        row(group, name, 1.0, **{f"/ {padded.DYNAMIC}": 0.3 if good else 0.35})
        for name in (padded.BUCKETS, padded.NO_GRAPHS)
    ]
    for unit, number in ((padded.PROGRAMS, 4), (padded.GRAPHS_RECORDED, 4 if good else 0)):
        rows.append(count_row(f"{group}: {unit}", padded.BUCKETS, number, unit, {OF_BUCKETS: number / 4}))
    return rows


def training_rows(good):
    ratios = {f"/ {training.BY_HAND}": 1.0 if good else 1.1}
    groups = ["training, 2048 wide, 32,768 tokens", "training, 1024 wide, 4,452 tokens"]
    return [row(group, name, 1.0, **ratios) for group in groups for name in (training.JAGGED, training.FLEX)]


def uneven_rows(good):
    ratios = {OF_FILL: 1.1 if good else 1.3}
    return [row("training, 50% fill", name, 1.0, **ratios) for name in (model.JAGGED, model.NESTED)]


def event_rows(good):
    amounts = {"plain, desugar.compile": 4, "declared, desugar.compile": 4 if good else 5}
    return [row("training, N = 20", name, 1.0) for name in amounts] + [
        count_row("cudaEventRecord in a training step", name, amount, calls.CALLS)
        for name, amount in amounts.items()
    ]


@pytest.mark.parametrize(
    ("name", "rows", "count"),
    [
        ("int8", int8_rows, 2),
        ("int8", lambda good: int8_rows(good, "limit / this"), 2),
        ("padded", padded_rows, 2),
        ("training", training_rows, 1),
        ("rows", uneven_rows, 1),
        ("model", uneven_rows, 1),
        ("events", event_rows, 1),
    ],
)
def test_goals_of_the_gpu(tmp_path, name, rows, count):
    """Ours alone have goals; each is reached by good figures and missed by the others."""
    for good in (True, False):
        save_rows(rows(good), {"torch": "2.13.0"}, tmp_path / f"gpu-{name}.json")
        found = goals.find_goals(tmp_path)
        assert [goal.is_reached for goal in found] == [good] * count


def test_fewer_events_than_plain_are_not_as_many():
    goal = goals.Goal("events", 4, 3, exactly=True)
    assert not goal.is_reached
    assert goal.cells()[1] == "exactly 4"


def test_every_gpu_item_with_a_goal_is_a_stage():
    read = {name.removeprefix("gpu-") for name in goals.READERS if name.startswith("gpu-")}
    assert read - {"rows"} <= BY_NAME.keys()  # the first run had a stage of that name
