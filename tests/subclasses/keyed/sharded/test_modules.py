"""Sharded collections on one rank: they are what they were before, and say what they cannot shard."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from subclasses.int8 import Int8Tensor
from subclasses.keyed import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from subclasses.keyed.sharded import (
    RowWise,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    ShardingPlan,
    TableShard,
    TableWise,
    shard,
)
from tests.doors import by_desugar, by_torch, eager
from tests.subclasses.keyed.batches import IDS, LENGTHS, batch

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module", autouse=True)
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


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


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda m: shard(nn.Linear(1, 1), m), "expected an EmbeddingBagCollection or EmbeddingCollection"),
        (
            lambda m: ShardedEmbeddingCollection(bags(), m),
            "expected an EmbeddingCollection, got EmbeddingBag",
        ),
        (lambda m: shard(bags(), "cpu"), "expected a DeviceMesh, got str"),
        (lambda m: shard(bags(), dist.init_device_mesh("cpu", (1, 1))), "a mesh of one dim, got 2"),
        (lambda m: shard(bags(), m, ShardingPlan({"a": RowWise()})), "a placement for 'b'"),
        (lambda m: shard(bags(max_norm=1.0), m), "the table of 'a' has max_norm"),
        (lambda m: shard(quantized(), m), "a plain tensor as the table of 'b', got an Int8Tensor"),
    ],
)
def test_what_cannot_be_sharded(mesh, make, text):
    with pytest.raises((TypeError, ValueError), match=text):
        make(mesh)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: torch.ones(2), TypeError, "expected a KeyedJaggedTensor"),
        (lambda: batch([1, 2], "az"), KeyError, "no table for z"),
        (
            lambda: batch([1, 2], weighted=True),
            ValueError,
            "weights go with mode='sum', and a, b pool otherwise",
        ),
        (
            lambda: KeyedJaggedTensor(["a", "b"], torch.tensor([9, 10]), torch.tensor([1, 1])),
            ValueError,
            "expected ids from 0 to 9 for 'b', got others",
        ),
    ],
)
def test_batches_are_refused_as_by_the_collection(mesh, make, error, text):
    with pytest.raises(error, match=text):
        shard(bags(mode="mean"), mesh)(make())


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
