"""Sharded collections on one rank, plans, the rows of a table as a parameter, row-wise Adagrad, and refused calls."""

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
import torch.nn.functional as F
from torch import nn

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from subclasses.int8 import Int8Tensor
from subclasses.keyed import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from subclasses.keyed.sharded import (
    RowWise,
    RowWiseAdagrad,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    ShardingPlan,
    TableShard,
    TableWise,
    plan_by_bytes,
    shard,
)
from subclasses.keyed.sharded.plan import rows_by_key
from subclasses.testing import suite
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
    """The dense numbers of a lookup's results."""
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
    """Neither package imports it; in a build without torch.distributed, the import error names the missing part."""
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


# ==== tables of one rank ==========================================================================================

ROWS, START = 9, 2


def make_shard(sparse=False, local=3):
    """A parameter with a gradient."""
    torch.manual_seed(0)
    p = nn.Parameter(TableShard(torch.randn(local, 2), start=START, rows=ROWS))
    ids = torch.tensor([0, 2, 2] if local else [], dtype=torch.int64)
    F.embedding(ids, p.unwrap("local"), sparse=sparse).square().sum().backward()
    return p


test_it_has_the_size_of_the_whole_table = giving(
    {
        "a shard": (lambda: make_shard().shape, (ROWS, 2)),
        "a gradient": (lambda: make_shard().grad.shape, (ROWS, 2)),
        "zeros": (lambda: torch.zeros_like(make_shard()).shape, (ROWS, 2)),
        "the rows here": (lambda: make_shard().rows_here().shape, (3, 2)),
        "the rows here, without a gradient": (lambda: make_shard().rows_here().requires_grad, False),
        "the rows here, shared": (
            lambda: (lambda p: p.rows_here().data_ptr() == p.local.data_ptr())(make_shard()),
            True,
        ),
        "a state of rows": (lambda: make_shard().like(torch.ones(3)).shape, (ROWS,)),
    }
)


@pytest.mark.parametrize("sparse", [False, True])
def test_states_and_gradients_know_their_rows(sparse):
    p = make_shard(sparse)
    assert type(p.grad) is TableShard.Cotangent and p.grad.is_sparse is p.grad.local.is_sparse is sparse
    for t in (p.grad, torch.zeros_like(p), p.detach().clone(), p.detach().to(torch.float64)):
        assert isinstance(t, TableShard) and (t.start, t.rows, t.local.shape[0]) == (START, ROWS, 3)


def test_a_coalesced_gradient_is_sparse_in_the_whole_table():
    p = make_shard(sparse=True)
    found = p.grad.coalesce()
    assert type(found) is torch.Tensor and found.shape == (ROWS, 2) and found.is_coalesced()
    assert found.indices().tolist() == [[START, START + 2]]
    assert torch.equal(found.to_dense()[START : START + 3], p.grad.local.to_dense())
    assert torch.equal(torch.zeros_like(p).add_(p).sparse_mask(found).to_dense()[START + 2], p.rows_here()[2])
    before, grad = p.rows_here().clone(), p.grad.local.to_dense()
    for added, alpha, factor in ((found, -0.5, -0.5), (p.grad, 0.75, 0.25)):
        with torch.no_grad():
            assert p.add_(added, alpha=alpha) is p
        torch.testing.assert_close(p.rows_here(), before + factor * grad)


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_accumulate_and_are_clipped(sparse):
    p = make_shard(sparse)
    once = p.grad.local.to_dense().clone()
    F.embedding(torch.tensor([0, 2, 2]), p.unwrap("local"), sparse=sparse).square().sum().backward()
    torch.testing.assert_close(p.grad.local.to_dense(), 2 * once)
    if not sparse:
        torch.nn.utils.clip_grad_value_([p], 0.25)
        assert p.grad.local.abs().max() == 0.25


NORM = "would count this rank's rows alone"
REFUSED_OPS = {
    "norm": (lambda p: p.grad.norm(), NORM),
    "linalg.norm": (lambda p: torch.linalg.norm(p.grad), NORM),
    "vector_norm": (lambda p: torch.linalg.vector_norm(p), NORM),
    "clip_grad_norm_": (lambda p: torch.nn.utils.clip_grad_norm_([p], 1.0, foreach=False), NORM),
    "clip_grad_norm_, foreach": (lambda p: torch.nn.utils.clip_grad_norm_([p], 1.0, foreach=True), NORM),
    "sum": (lambda p: p.sum(), "TableShard"),
    "add": (lambda p: p + 1, "TableShard"),
    "a row": (lambda p: p[0], "TableShard"),
    "t": (lambda p: p.t(), "TableShard"),
    "embedding": (lambda p: F.embedding(torch.tensor([1]), p), "TableShard"),
    "equal": (lambda p: torch.equal(p, p), "TableShard"),
}
test_other_ops_are_refused = raising(
    {name: (lambda call=call: call(make_shard()), text) for name, (call, text) in REFUSED_OPS.items()}
)


# ---- checkpoints -----------------------------------------------------------------------------------------------


def test_what_a_checkpoint_writes_and_reads():
    p = make_shard()
    (item,) = p.__create_write_items__("name", p)
    assert item.index.fqn == "name" and item.tensor_data.size == (ROWS, 2)
    (chunk,) = p.__create_chunk_list__()
    assert (chunk.offsets, chunk.sizes) == ((START, 0), (3, 2)) and item.tensor_data.chunk == chunk
    assert p.__get_tensor_shard__(item.index).data_ptr() == p.local.data_ptr()


def written(local, rows):
    """How many items and chunks a rank writes."""
    p = TableShard(torch.ones(local, 2), start=0, rows=rows)
    return len(p.__create_write_items__("name", p)), len(p.__create_chunk_list__())


test_a_rank_without_rows_writes_nothing = giving(
    {
        "no rows here": (lambda: written(0, ROWS), (0, 0)),
        "no rows at all": (lambda: written(0, 0), (1, 1)),  # somebody has to write that such a table exists
    }
)


# ---- the conformance kit ---------------------------------------------------------------------------------------


def some_rows(start=2):
    return TableShard(torch.randn(3, 2), start=start, rows=9)


TestConformance = suite(
    some_rows,
    # The whole table, with zeros where this rank has no rows.
    reference=lambda x: F.pad(x.unwrap("local"), (0, 0, x.start, x.rows - x.start - x.local.shape[0])),
    variants=[lambda: some_rows(start=4)],
)

# ==== row-wise Adagrad ==============================================================================================


def after_a_step(data, sums, grad, lr=0.1, eps=1e-10):
    """The formula, for a table and its sums."""
    sums = sums + (grad * grad).mean(1)
    step = lr * grad / (sums.sqrt() + eps).unsqueeze(1)
    return torch.where(grad.abs().sum(1, keepdim=True) > 0, data - step, data), sums


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_steps_are_those_of_the_formula(sparse, sharded):
    data, sums = torch.randn(5, 3), torch.full((5,), 0.5)
    table = nn.Parameter(TableShard(data.clone(), start=2, rows=9) if sharded else data.clone())
    optimizer = RowWiseAdagrad([table], lr=0.1, initial_accumulator_value=0.5)
    for ids in ([0, 1, 1], [], [1, 4]):
        optimizer.zero_grad()
        local = table.unwrap("local") if sharded else table
        F.embedding(torch.tensor(ids, dtype=torch.int64), local, sparse=sparse).square().sum().backward()
        data, sums = after_a_step(data, sums, (table.grad.local if sharded else table.grad).to_dense())
        optimizer.step()
        state = optimizer.state[table]["sum"]
        assert state.shape == table.shape[:1] and type(state) is (TableShard if sharded else torch.Tensor)
        found = (table.rows_here(), state.local) if sharded else (table.detach(), state)
        torch.testing.assert_close(found, (data, sums))


def test_its_state_is_saved_and_loaded():
    tables = [nn.Parameter(some_rows()) for _ in range(2)]
    optimizers = [RowWiseAdagrad([{"params": [table], "lr": 0.5}], lr=0.1) for table in tables]

    def step(number):
        tables[number].grad = None
        tables[number].unwrap("local").square().sum().backward()
        optimizers[number].step()

    step(0)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    tables[1].data.copy_(tables[0].data)
    assert optimizers[1].param_groups[0]["lr"] == 0.5
    step(0), step(1)
    assert torch.equal(*(table.local for table in tables))


def test_a_closure_is_called_with_gradients():
    table = nn.Parameter(torch.ones(2, 2))

    def closure():
        loss = table.sum()
        loss.backward()
        return loss

    assert RowWiseAdagrad([table]).step(closure).item() == 4 and table.max() < 1


ONES = nn.Parameter(torch.ones(2, 2))
test_what_the_optimizer_refuses = raising(
    [
        (lambda: RowWiseAdagrad([nn.Parameter(ONES[0])]), ValueError, r"tables \[V, D\], got .* size \(2,\)"),
        (lambda: RowWiseAdagrad([ONES], lr=-1), ValueError, "lr: expected a number from 0"),
        (lambda: RowWiseAdagrad([ONES], eps=-1), ValueError, "eps: expected a number"),
        (lambda: RowWiseAdagrad([]), ValueError, "empty parameter list"),
    ]
)
