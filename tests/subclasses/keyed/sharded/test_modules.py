"""Sharded collections on one rank, plans, and what is refused of both."""

import contextlib
import copy
import operator
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from subclasses.int8 import Int8Tensor
from subclasses.keyed import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from subclasses.keyed.sharded import (
    RowWise,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    ShardingPlan,
    TableShard,
    TableWise,
    plan_by_bytes,
    shard,
)
from subclasses.keyed.sharded.plan import rows_by_key
from tests.doors import by_desugar, by_torch, eager
from tests.subclasses.keyed.batches import IDS, LENGTHS, batch
from tests.tables import giving, raising

ROOT = Path(__file__).parents[4]


@contextlib.contextmanager
def ranks(world):
    """The mesh of this rank, and of others that are not there."""
    backend, store = ("gloo", dist.HashStore()) if world == 1 else ("fake", FakeStore())
    dist.init_process_group(backend, store=store, rank=0, world_size=world)
    try:
        yield dist.init_device_mesh("cpu", (world,))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def mesh():
    with ranks(1) as mesh:
        yield mesh


def bags(**options):
    return EmbeddingBagCollection({key: nn.EmbeddingBag(IDS, 3, **options) for key in "ab"})


def looked_up():
    return EmbeddingCollection({key: nn.Embedding(IDS, 3) for key in "ab"})


def numbers(found):
    """The dense numbers of what a lookup gives."""
    return [f if type(f) is torch.Tensor else f.values for f in found.values()]


def check_gradients(sharded, whole):
    for key, table in whole.tables.items():
        torch.testing.assert_close(sharded.tables[key].weight.grad.local, table.weight.grad)


@pytest.mark.parametrize("plan", [None, ShardingPlan({"a": TableWise(0), "b": RowWise()})])
@pytest.mark.parametrize("lengths", [*LENGTHS, []])
@pytest.mark.parametrize(
    ("make", "kind"), [(bags, ShardedEmbeddingBagCollection), (looked_up, ShardedEmbeddingCollection)]
)
def test_one_rank_gives_what_the_collection_gives(mesh, make, kind, plan, lengths):
    x, whole = batch(lengths), make()
    sharded = shard(whole, mesh, plan)
    found, expected = sharded(x), whole(x)
    assert type(sharded) is kind and list(found) == list(expected)
    for got, want in zip(found.values(), expected.values(), strict=True):
        assert type(got) is type(want) and got.shape == want.shape
    torch.testing.assert_close(numbers(found), numbers(expected))
    for results in (found, expected):
        sum((f * f).sum() for f in results.values()).backward()
    check_gradients(sharded, whole)


def test_parameters_have_the_names_of_the_collection(mesh):
    whole, x = bags(), batch([1, 2, 0, 3])
    sharded = shard(whole, mesh)
    assert list(sharded.state_dict()) == list(whole.state_dict())
    assert all(type(p) is TableShard or isinstance(p, nn.Parameter) for p in sharded.parameters())
    assert "rows 0 to 10 of 10, 3 columns" in repr(sharded)
    sharded.tables["a"].weight.rows_here().zero_()
    assert whole.tables["a"].weight.abs().min() > 0, "it has a copy"
    assert torch.equal(copy.deepcopy(sharded)(x)["b"], sharded(x)["b"])


def test_a_table_without_rows(mesh):
    sharded = shard(EmbeddingBagCollection({"a": nn.EmbeddingBag(0, 3), "b": nn.EmbeddingBag(2, 3)}), mesh)
    found = sharded(KeyedJaggedTensor(["a", "b"], torch.tensor([1]), torch.tensor([0, 0, 1, 0])))
    assert found["a"].tolist() == [[0] * 3] * 2
    found["b"].sum().backward()


BREAKING = {
    "stock": lambda f: torch.compile(f, backend="eager"),
    "behind Dynamo": by_torch,
    "desugar.compile": by_desugar,
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("way", BREAKING)
def test_a_compiled_model_breaks_its_graph_there(mesh, way):
    whole = bags(mode="sum")
    sharded, x = shard(whole, mesh), batch([1, 2, 0, 3])
    for module, door in ((sharded, BREAKING[way]), (whole, eager)):
        door(lambda x, module=module: sum((f * f).sum() for f in module(x).values()) * 2)(x).backward()
    check_gradients(sharded, whole)


# ---- errors ----------------------------------------------------------------------------------------------------


def quantized():
    collection, int8 = bags(), Int8Tensor.from_float(torch.randn(IDS, 3))
    collection.tables["b"].weight = nn.Parameter(int8, requires_grad=False)
    return collection


def ids_elsewhere():
    values, lengths = (torch.ones(2, dtype=torch.int64, device="meta") for _ in range(2))
    return KeyedJaggedTensor(["a", "b"], values, lengths, max_length=1)


FLOAT64 = batch([1, 2], weighted=True).to(torch.float64)
BEYOND = KeyedJaggedTensor(["a", "b"], torch.tensor([9, 10]), torch.tensor([1, 1]))
NAME = "ShardedEmbeddingBagCollection: "


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        # tables
        (
            lambda m: shard(nn.Linear(1, 1), m),
            TypeError,
            "expected an EmbeddingBagCollection or EmbeddingCollection",
        ),
        (
            lambda m: ShardedEmbeddingCollection(bags(), m),
            TypeError,
            "expected an EmbeddingCollection, got EmbeddingBag",
        ),
        (lambda m: shard(bags(), "cpu"), TypeError, "expected a DeviceMesh, got str"),
        (
            lambda m: shard(bags(), dist.init_device_mesh("cpu", (1, 1))),
            ValueError,
            "a mesh of one dim, got 2",
        ),
        (
            lambda m: shard(bags(), DeviceMesh("meta", [0])),
            ValueError,
            f"{NAME}expected the table of 'a' on meta, the device of the mesh, got cpu; "
            "move the collection there first, by collection.to",
        ),
        (lambda m: shard(bags(), m, ShardingPlan({"a": RowWise()})), ValueError, "a placement for 'b'"),
        (lambda m: shard(bags(max_norm=1.0), m), ValueError, "the table of 'a' has max_norm"),
        (
            lambda m: shard(quantized(), m),
            TypeError,
            "a plain tensor as the table of 'b', got an Int8Tensor",
        ),
        # batches
        (lambda m: shard(bags(), m)(torch.ones(2)), TypeError, "expected a KeyedJaggedTensor"),
        (lambda m: shard(bags(), m)(batch([1, 2], "az")), KeyError, "no table for z"),
        (
            lambda m: shard(bags(), m)(batch([1, 2], weighted=True)),
            ValueError,
            "weights go with mode='sum', and a, b pool otherwise",
        ),
        (lambda m: shard(bags(), m)(BEYOND), ValueError, "expected ids from 0 to 9 for 'b', got others"),
        (
            lambda m: shard(bags(), m)(ids_elsewhere()),
            ValueError,
            f"{NAME}expected ids on cpu, the device of the mesh, got meta; move them there by ids.to",
        ),
        (
            lambda m: shard(bags(mode="sum"), m)(FLOAT64),
            ValueError,
            rf"{NAME}expected weights of the tables' dtype, torch.float32, got torch.float64; convert the batch "
            r"with ids.to\(torch.float32\)",
        ),
    ],
)
def test_what_is_refused(mesh, call, error, text):
    with pytest.raises(error, match=text):
        call(mesh)


def test_a_mesh_of_other_ranks_is_refused():
    text = (
        f"{NAME}expected a mesh that this process is part of, got .*; call it only on the ranks of the mesh"
    )
    with ranks(2), pytest.raises(ValueError, match=text):
        shard(bags(), DeviceMesh("cpu", [1]))


def test_weights_are_converted_as_advised(mesh):
    assert shard(bags(mode="sum"), mesh)(FLOAT64.to(torch.float32))["a"].dtype == torch.float32


@pytest.mark.slow
def test_it_is_imported_where_it_is_asked_for():
    """Neither package imports it; and a build without torch.distributed says what is missing."""
    code = (
        "import sys, torch, subclasses.keyed, desugar\n"
        "assert 'subclasses.keyed.sharded' not in sys.modules\n"
        "torch.distributed.is_available = lambda: False\n"
        "try:\n    import subclasses.keyed.sharded\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "needs torch.distributed" in done.stdout


# ==== plans =========================================================================================================


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
    assert pickle.loads(pickle.dumps(plan)) == plan != ShardingPlan({"a": TableWise(0)})


SHARED, TIED = nn.EmbeddingBag(4, 1), nn.EmbeddingBag(4, 1)
TIED.weight = SHARED.weight
KEYS_OF_ONE = {"a": SHARED, "b": SHARED, "c": TIED}


def planned(**placements):
    """A plan of two ranks for the tables a and b."""
    return lambda: ShardingPlan(placements).bytes_by_rank(tables(a=3, b=4), 2)


test_plans_that_are_refused = raising(
    {
        "a write": (
            lambda: operator.setitem(ShardingPlan({"a": RowWise()}).placements, "b", RowWise()),
            TypeError,
            "item assignment",
        ),
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


COLLECTION = EmbeddingBagCollection(
    {"a": nn.EmbeddingBag(4, 2, dtype=torch.float64), "b": nn.EmbeddingBag(4, 2)}
)
test_plans_of_tables_that_keys_share_and_of_collections = giving(
    {
        "one key's placement": (
            lambda: ShardingPlan({"b": TableWise(1)}).bytes_by_rank(KEYS_OF_ONE, 2),
            [0, 16],
        ),
        "two keys' placement": (
            lambda: ShardingPlan({"b": RowWise(), "a": RowWise()}).bytes_by_rank(KEYS_OF_ONE, 2),
            [8, 8],
        ),
        "the planner's": (
            lambda: dict(plan_by_bytes(KEYS_OF_ONE, 1).placements),
            dict.fromkeys("abc", TableWise(0)),
        ),
        "bytes by dtype": (
            lambda: plan_by_bytes(COLLECTION, 2, row_wise_over=64).bytes_by_rank(COLLECTION, 2),
            [64, 32],
        ),
    }
)


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
