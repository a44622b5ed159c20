"""Checkpoints of sharded tables and of their optimizers load on other numbers of ranks, and under other plans."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from subclasses.keyed.sharded import RowWiseAdagrad, shard
from tests.subclasses.keyed.sharded.ranks import (
    PLANS,
    assert_same_rows,
    batches,
    joint_loss,
    loss_of,
    make_collection,
    make_plan,
)
from tests.subclasses.ragged.ranks import group, in_processes, on_ranks

# torch's own: of reading and writing without a process group, and of its typed storages.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),  # Adagrad's own
]

OPTIMIZERS = {
    "SGD": (False, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "Adam": (False, lambda p: torch.optim.Adam(p, 0.1)),
    "Adagrad": (False, lambda p: torch.optim.Adagrad(p, 0.1)),
    "sparse Adagrad": (True, lambda p: torch.optim.Adagrad(p, 0.1)),
    "row-wise": (False, lambda p: RowWiseAdagrad(p, 0.1)),
    "sparse row-wise": (True, lambda p: RowWiseAdagrad(p, 0.1)),
}

# ---- one process ------------------------------------------------------------------------------------------------


def train(module, optimizer, loss, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss(module).backward()
        optimizer.step()


def train_whole(name, steps):
    """What one process has after some steps."""
    sparse, make_optimizer = OPTIMIZERS[name]
    whole = make_collection("sum", sparse=sparse)
    optimizer = make_optimizer([*whole.parameters()])
    train(whole, optimizer, lambda m: joint_loss(m, batches("rows of all lengths")), steps)
    return whole


# ---- ranks -----------------------------------------------------------------------------------------------------


def make(mesh, name, plan, seed):
    sparse, make_optimizer = OPTIMIZERS[name]
    whole = make_collection("sum", seed, sparse=sparse)
    sharded = shard(whole, mesh, make_plan(plan))
    return sharded, make_optimizer([*sharded.parameters()])


def loss_here(mesh):
    """The loss of this rank's batch; of all batches where there is one rank only."""
    parts, rank = batches("rows of all lengths"), mesh.get_local_rank()
    return lambda m: joint_loss(m, parts) if mesh.size() == 1 else loss_of(m(parts[rank]), rank)


def save(mesh, plan, folder):
    """Trains for two steps, and saves tables and state."""
    for name in OPTIMIZERS:
        module, optimizer = make(mesh, name, plan, seed=0)
        train(module, optimizer, loss_here(mesh), 2)
        tables, state = get_state_dict(module, optimizer)
        dcp.save({"tables": tables, "state": state}, checkpoint_id=folder / name)


def load(mesh, plan, folder):
    """Loads into other tables, and goes on as one process does."""
    for name in OPTIMIZERS:
        module, optimizer = make(mesh, name, plan, seed=1)
        if name == "SGD":  # its state is made by the first step
            module(batches("one row")[mesh.get_local_rank()])["a"].sum().backward()
            optimizer.step()
        tables, state = get_state_dict(module, optimizer)
        found = {"tables": tables, "state": state}
        dcp.load(found, checkpoint_id=folder / name)
        set_state_dict(module, optimizer, model_state_dict=found["tables"], optim_state_dict=found["state"])
        assert_same_rows(module, train_whole(name, 2))
        train(module, optimizer, loss_here(mesh), 1)
        assert_same_rows(module, train_whole(name, 3))


def load_whole_tables(mesh, folder):
    """A checkpoint of the unsharded collection loads into shards, under any plan, and the reverse."""
    for plan in PLANS:
        sharded = shard(make_collection("none", seed=1), mesh, make_plan(plan))
        tables = sharded.state_dict()
        dcp.load(tables, checkpoint_id=folder / "whole")
        sharded.load_state_dict(tables)
        assert_same_rows(sharded, make_collection("none"))
        dcp.save(tables, checkpoint_id=folder / plan)


@on_ranks
def load_and_save(mesh, folder):
    load_whole_tables(mesh, folder)
    for plan in ("both", "rows"):
        load(mesh, plan, folder / "of one rank")
    save(mesh, "both", folder / "of two ranks")
    for plan in ("both", "rank 1"):
        load(mesh, plan, folder / "of two ranks")


@pytest.mark.slow
def test_checkpoints_load_on_other_numbers_of_ranks(tmp_path):
    whole = make_collection("none")
    with group(0, 1, tmp_path / "first store") as mesh:
        save(mesh, "rank 0", tmp_path / "of one rank")
        dcp.save(whole.state_dict(), checkpoint_id=tmp_path / "whole")
    in_processes(load_and_save, tmp_path)
    with group(0, 1, tmp_path / "last store") as mesh:
        load(mesh, "rank 0", tmp_path / "of two ranks")
        load(mesh, "rows", tmp_path / "of one rank")
        for plan in PLANS:
            other = make_collection("none", seed=1)
            dcp.load(other.state_dict(), checkpoint_id=tmp_path / plan)
            assert all(map(torch.equal, other.parameters(), whole.parameters()))
