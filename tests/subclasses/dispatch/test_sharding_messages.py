"""Errors of FSDP2 and checkpoints for values that cannot be cut into rows, or joined again."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from subclasses import DispatchError
from tests.subclasses.subjects import declare

# torch's own: of reading and writing without a process group, and of its typed storages.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*")


@contextlib.contextmanager
def fake_ranks(world):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield dist.init_device_mesh("cpu", (world,))
    finally:
        dist.destroy_process_group()


MATERIALIZE = {"fallback": "materialize"}
# Its rows correspond to the rows of its inner tensor.
Halves = declare(
    __module__=__name__, name="Halves", keywords=MATERIALIZE, materialize=lambda self: self.held * 2
)
# Its rows do not correspond to the rows of its inner tensor.
Reversed = declare(
    __module__=__name__, name="Reversed", keywords=MATERIALIZE, materialize=lambda self: self.held.flip(0)
)
# Forgets the last rows where it puts the parts of all ranks together.
Lacking = declare(
    Halves,
    name="Lacking",
    fsdp_pre_all_gather=lambda self, mesh: ((self.held,), None),
    fsdp_post_all_gather=lambda self, outputs, metadata, dtype, *, out=None: (
        Lacking(outputs[0][:-1]),
        outputs,
    ),
)


class Layer(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(w, requires_grad=False)

    def forward(self, x):
        return self.w * x


# ---- FSDP2 -------------------------------------------------------------------------------------------------------


def test_columns_are_not_cut():
    layer = Layer(Halves(torch.randn(4, 4)))
    text = r"fully_shard of a Halves along dim 1: .* let shard_placement_fn return Shard\(0\) or None for it"
    with fake_ranks(2) as mesh:
        with pytest.raises(DispatchError, match=text):
            fully_shard(layer, mesh=mesh, shard_placement_fn=lambda p: Shard(1))
        fully_shard(layer, mesh=mesh, shard_placement_fn=lambda p: Shard(0))
        assert layer.w._local_tensor.shape == (2, 4)


def test_a_hook_of_ones_own_that_returns_another_size():
    layer = Layer(Lacking(torch.randn(4, 4)))
    text = (
        r"fully_shard of a Lacking: fsdp_post_all_gather returned one of size \(3, 4\), and the Parameter has size "
        r"\(4, 4\); rebuild the whole Parameter in it"
    )
    with fake_ranks(2) as mesh:
        fully_shard(layer, mesh=mesh)
        with pytest.raises(DispatchError, match=text):
            layer(torch.ones(4))


# ---- checkpoints of another number of ranks ------------------------------------------------------------------------


def save_and_load(folder, make, dim, *, loading):
    """Saves the part of the first of two ranks, and loads the part of the first of `loading` ranks."""
    for world, act in ((2, dcp.save), (loading, dcp.load)):
        with fake_ranks(world) as mesh:
            part = DTensor.from_local(make(8 // world), mesh, [Shard(dim)])
            act({"w": part}, checkpoint_id=folder, no_dist=True)


CHECKPOINTS = {
    "columns": (
        lambda n: Halves(torch.randn(4, n)),
        1,
        r"a distributed checkpoint of a Halves of size \(4, 4\), saved or loaded by another number of ranks: values "
        r"that are not plain tensors are cut into rows, got a cut of dim 1; load it with the placements "
        r"and as many ranks as it was saved with",
    ),
    "rows of another meaning": (
        lambda n: Reversed(torch.randn(n, 4)),
        0,
        r"a distributed checkpoint of a Reversed of size \(4, 4\), .*rows differ from a value of the same rows of its "
        r"inner tensors; load it with as many ranks as saved it, or write rules for torch.ops.aten.slice.Tensor "
        r"and view",
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_that_other_ranks_cannot_load(name, tmp_path):
    make, dim, text = CHECKPOINTS[name]
    with pytest.raises(dcp.api.CheckpointException, match=text):  # with the traceback of the error
        save_and_load(tmp_path, make, dim, loading=4)


LOADED = {
    **{name: (make, dim, 2) for name, (make, dim, _) in CHECKPOINTS.items()},
    "rows that mean rows, on other ranks": (lambda n: Halves(torch.randn(n, 4)), 0, 4),
}


@pytest.mark.parametrize("name", LOADED)
def test_checkpoints_that_are_loaded(name, tmp_path):
    make, dim, ranks = LOADED[name]
    save_and_load(tmp_path, make, dim, loading=ranks)
