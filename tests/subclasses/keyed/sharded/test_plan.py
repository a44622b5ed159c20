"""Plans: where rows are, what is refused, and the planner by bytes."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

pytest.importorskip("torch.distributed.device_mesh")

from subclasses.keyed import EmbeddingBagCollection
from subclasses.keyed.sharded import RowWise, ShardingPlan, TableWise, plan_by_bytes
from subclasses.keyed.sharded.plan import rows_by_key
from tests.tables import raising


def tables(**sizes):
    """Tables of one column of four bytes a row, on no device."""
    return {key: nn.EmbeddingBag(rows, 1, device="meta") for key, rows in sizes.items()}


@pytest.mark.parametrize(
    ("placement", "rows", "expected"),
    [
        (TableWise(1), 5, [(0, 0), (0, 5), (5, 5)]),
        (TableWise(0), 0, [(0, 0)] * 3),
        (RowWise(), 6, [(0, 2), (2, 4), (4, 6)]),
        (RowWise(), 7, [(0, 3), (3, 6), (6, 7)]),
        (RowWise(), 4, [(0, 2), (2, 4), (4, 4)]),
        (RowWise(), 1, [(0, 1), (1, 1), (1, 1)]),
        (RowWise(), 0, [(0, 0)] * 3),
    ],
)
def test_rows_of_each_rank(placement, rows, expected):
    found = rows_by_key(ShardingPlan({"a": placement}), tables(a=rows), 3)["a"]
    assert [found.range_on(rank) for rank in range(3)] == expected
    assert [found.count_on(rank) for rank in range(3)] == [stop - start for start, stop in expected]


def test_a_plan_is_a_record():
    placements = {"a": RowWise()}
    plan = ShardingPlan(placements)
    placements["b"] = TableWise(0)
    assert dict(plan.placements) == {"a": RowWise()}
    with pytest.raises(TypeError):
        plan.placements["b"] = RowWise()
    assert pickle.loads(pickle.dumps(plan)) == plan != ShardingPlan({"a": TableWise(0)})


SHARED, TIED = nn.EmbeddingBag(4, 1), nn.EmbeddingBag(4, 1)
TIED.weight = SHARED.weight
KEYS_OF_ONE = {"a": SHARED, "b": SHARED, "c": TIED}


def planned(**placements):
    """A plan of two ranks for the tables a and b."""
    return lambda: ShardingPlan(placements).bytes_by_rank(tables(a=3, b=4), 2)


test_what_is_refused = raising(
    {
        "no placement": (
            lambda: ShardingPlan({"a": 0}),
            TypeError,
            r"expected a TableWise\(rank\) or RowWise\(\) for each key, got 0 for 'a'",
        ),
        "a class": (lambda: ShardingPlan({"a": TableWise}), TypeError, "for each key"),
        "a number as key": (lambda: ShardingPlan({0: RowWise()}), TypeError, "for each key"),
        "a key too few": (planned(a=RowWise()), ValueError, "a placement for 'b', got none"),
        "a key too many": (
            planned(a=RowWise(), b=RowWise(), z=RowWise()),
            ValueError,
            "which are a, b, got z",
        ),
        "a rank too far": (
            planned(a=TableWise(2), b=RowWise()),
            ValueError,
            "a rank from 0 to 1 for 'a', got 2",
        ),
        "a rank below 0": (
            planned(a=TableWise(-1), b=RowWise()),
            ValueError,
            "a rank from 0 to 1 for 'a', got -1",
        ),
        "two placements of one table": (
            lambda: ShardingPlan({"a": RowWise(), "c": TableWise(0)}).bytes_by_rank(KEYS_OF_ONE, 2),
            ValueError,
            "one placement for a table that keys share",
        ),
        "no ranks": (lambda: plan_by_bytes(tables(a=1), 0), ValueError, "at least one rank, got 0"),
        "no tables": (
            lambda: plan_by_bytes(3, 2),
            TypeError,
            "a collection of embedding tables, or its tables by key, got int",
        ),
    }
)


def test_keys_that_share_a_table_share_its_placement():
    assert ShardingPlan({"b": TableWise(1)}).bytes_by_rank(KEYS_OF_ONE, 2) == [0, 16]
    assert ShardingPlan({"b": RowWise(), "a": RowWise()}).bytes_by_rank(KEYS_OF_ONE, 2) == [8, 8]
    assert set(plan_by_bytes(KEYS_OF_ONE, 1).placements.items()) == {(key, TableWise(0)) for key in "abc"}


@pytest.mark.parametrize(
    ("sizes", "ranks", "options", "expected", "loads"),
    [
        ({"a": 4, "b": 3, "c": 3, "d": 2}, 2, {}, {"a": 0, "b": 1, "c": 1, "d": 0}, [24, 24]),
        ({"a": 10, "b": 2, "c": 2}, 2, {}, {"a": None, "b": 0, "c": 1}, [28, 28]),
        ({"a": 7, "b": 1}, 2, {}, {"a": None, "b": 1}, [16, 16]),  # the larger part of a is on rank 0
        ({"a": 4, "b": 3}, 2, {"row_wise_over": 12}, {"a": None, "b": 0}, [20, 8]),
        ({"a": 4, "b": 3}, 2, {"row_wise_over": 10**9}, {"a": 0, "b": 1}, [16, 12]),
        ({"a": 4, "b": 3}, 1, {"row_wise_over": 0}, {"a": 0, "b": 0}, [28]),
        ({"a": 0}, 2, {}, {"a": 0}, [0, 0]),
    ],
)
def test_the_planner_balances_bytes(sizes, ranks, options, expected, loads):
    modules = tables(**sizes)
    plan = plan_by_bytes(modules, ranks, **options)
    want = {key: RowWise() if rank is None else TableWise(rank) for key, rank in expected.items()}
    assert dict(plan.placements) == want
    assert plan.bytes_by_rank(modules, ranks) == loads


def test_the_planner_takes_a_collection_and_counts_its_dtypes():
    wide = nn.EmbeddingBag(4, 2, dtype=torch.float64)
    collection = EmbeddingBagCollection({"a": wide, "b": nn.EmbeddingBag(4, 2)})
    assert plan_by_bytes(collection, 2, row_wise_over=64).bytes_by_rank(collection, 2) == [64, 32]
