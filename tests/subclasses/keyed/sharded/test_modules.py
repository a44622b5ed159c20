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

import desugar
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
from tests.subclasses.keyed.batches import IDS, LENGTHS, batch

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module", autouse=True)
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def bags(**options):
    return EmbeddingBagCollection({key: nn.EmbeddingBag(IDS, 3, **options) for key in "ab"})


@pytest.mark.parametrize("plan", [None, ShardingPlan({"a": TableWise(0), "b": RowWise()})])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_one_rank_gives_what_the_collection_gives(mesh, plan, lengths):
    x = batch(lengths)
    for whole in (bags(), EmbeddingCollection({key: nn.Embedding(IDS, 3) for key in "ab"})):
        sharded = shard(whole, mesh, plan)
        kind = ShardedEmbeddingBagCollection if type(whole) is EmbeddingBagCollection else None
        assert type(sharded) is (kind or ShardedEmbeddingCollection)
        found, expected = sharded(x), whole(x)
        for key, want in expected.items():
            got = found[key]
            assert type(got) is type(want) and got.shape == want.shape
            torch.testing.assert_close(*((got, want) if kind else (got.values, want.values)))
        sum((f * f).sum() for f in found.values()).backward()
        sum((f * f).sum() for f in expected.values()).backward()
        for key in "ab":
            got = sharded.tables[key].weight.grad
            torch.testing.assert_close(got.local, whole.tables[key].weight.grad)


def test_parameters_have_the_names_of_the_collection(mesh):
    whole = bags()
    sharded = shard(whole, mesh)
    assert list(sharded.state_dict()) == list(whole.state_dict())
    assert all(type(p) is TableShard or isinstance(p, nn.Parameter) for p in sharded.parameters())
    assert "rows 0 to 10 of 10, 3 columns" in repr(sharded)
    sharded.tables["a"].weight.rows_here().zero_()
    assert whole.tables["a"].weight.abs().min() > 0, "it has a copy"
    other = copy.deepcopy(sharded)
    assert torch.equal(other(batch([1, 2, 0, 3]))["b"], sharded(batch([1, 2, 0, 3]))["b"])


def test_a_table_without_rows(mesh):
    sharded = shard(EmbeddingBagCollection({"a": nn.EmbeddingBag(0, 3), "b": nn.EmbeddingBag(2, 3)}), mesh)
    x = KeyedJaggedTensor(["a", "b"], torch.tensor([1]), torch.tensor([0, 0, 1, 0]))
    found = sharded(x)
    assert found["a"].tolist() == [[0] * 3] * 2
    found["b"].sum().backward()


def test_a_batch_without_rows(mesh):
    x = KeyedJaggedTensor(["a", "b"], torch.ones(0, dtype=torch.int64), torch.ones(0, dtype=torch.int64))
    assert shard(bags(), mesh)(x)["a"].shape == bags()(x)["a"].shape == (0, 3)


BREAKING = {
    "stock": lambda f: torch.compile(f, backend="eager"),
    "behind Dynamo": lambda f: torch.compile(f, backend="desugar", options={"backend": "eager"}),
    "desugar.compile": lambda f: desugar.compile(f, backend="eager"),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("way", BREAKING)
def test_a_compiled_model_breaks_its_graph_there(mesh, way):
    whole = bags(mode="sum")
    sharded, x = shard(whole, mesh), batch([1, 2, 0, 3])

    def loss(module):
        return lambda x: sum((f * f).sum() for f in module(x).values()) * 2

    BREAKING[way](loss(sharded))(x).backward()
    loss(whole)(x).backward()
    for key in "ab":
        torch.testing.assert_close(sharded.tables[key].weight.grad.local, whole.tables[key].weight.grad)


# ---- errors ----------------------------------------------------------------------------------------------------


def quantized():
    collection = bags()
    collection.tables["b"].weight = nn.Parameter(
        Int8Tensor.from_float(torch.randn(IDS, 3)), requires_grad=False
    )
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
