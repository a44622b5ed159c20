"""What one rank alone finds wrong, and says: a mesh without it, devices of others, and weights of another dtype."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from subclasses.keyed import EmbeddingBagCollection, KeyedJaggedTensor
from subclasses.keyed.sharded import shard
from tests.subclasses.keyed.batches import IDS, batch

NAME = "ShardedEmbeddingBagCollection"


@contextlib.contextmanager
def fake_ranks(world):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield dist.init_device_mesh("cpu", (world,))
    finally:
        dist.destroy_process_group()


def bags():
    return EmbeddingBagCollection({key: nn.EmbeddingBag(IDS, 3, mode="sum") for key in "ab"})


def ids_elsewhere():
    values, lengths = (torch.ones(2, dtype=torch.int64, device="meta") for _ in range(2))
    return KeyedJaggedTensor(["a", "b"], values, lengths, max_length=1)


FLOAT64 = batch([1, 2], weighted=True).to(torch.float64)


@pytest.mark.parametrize(
    ("ranks", "run", "text"),
    [
        (
            2,
            lambda mesh: shard(bags(), DeviceMesh("cpu", [1])),
            "expected a mesh that this process is part of, got .*; call it only on the ranks of the mesh",
        ),
        (
            1,
            lambda mesh: shard(bags(), DeviceMesh("meta", [0])),
            "expected the table of 'a' on meta, the device of the mesh, got cpu; "
            "move the collection there first, by collection.to",
        ),
        (
            1,
            lambda mesh: shard(bags(), mesh)(ids_elsewhere()),
            "expected ids on cpu, the device of the mesh, got meta; move them there by ids.to",
        ),
        (
            1,
            lambda mesh: shard(bags(), mesh)(FLOAT64),
            "expected weights of the tables' dtype, torch.float32, got torch.float64; convert the batch with "
            r"ids.to\(torch.float32\)",
        ),
    ],
    ids=["a mesh of other ranks", "tables elsewhere", "ids elsewhere", "weights of another dtype"],
)
def test_devices_ranks_and_dtypes(ranks, run, text):
    with fake_ranks(ranks) as mesh, pytest.raises(ValueError, match=f"{NAME}: {text}"):
        run(mesh)


def test_weights_are_converted_as_advised():
    with fake_ranks(1) as mesh:
        assert shard(bags(), mesh)(FLOAT64.to(torch.float32))["a"].dtype == torch.float32
