"""Int8 models saved by `torch.distributed.checkpoint`, and loaded on as many ranks or others."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from subclasses.int8 import Int8WeightOnlyConfig, quantize_
from tests.distributed.models import MLP
from tests.distributed.world import Case, Run, World, randn

Place = Callable[[World, nn.Module], nn.Module]


def on_one(world: World, model: nn.Module) -> nn.Module:
    return model


def by_rows(world: World, model: nn.Module) -> nn.Module:
    for layer in model.children():
        world.fully_shard(layer)
    return world.fully_shard(model)


def in_parallel(world: World, model: nn.Module) -> nn.Module:
    return world.parallelize(model, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def quantized(inside: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = MLP(inside=inside)
    quantize_(model, Int8WeightOnlyConfig())
    return model.requires_grad_(False)


@contextmanager
def shared_folder(world: World) -> Iterator[str]:
    """A folder that the first rank made, until all ranks have used it."""
    with tempfile.TemporaryDirectory() as own:
        name = [own]
        dist.broadcast_object_list(name, 0)
        yield name[0]
        dist.barrier()


def saved_and_loaded(place: Place, place_loaded: Place, inside: int = 16) -> Run:
    def run(world: World) -> Iterator[Any]:
        saved = world.compile(place(world, quantized(inside, 0)))
        yield saved(randn(4, 8))
        if world.mesh is None:
            yield saved(randn(4, 8))
            return
        loaded = world.compile(place_loaded(world, quantized(inside, 1)))
        with shared_folder(world) as folder:
            if place is not on_one or world.rank == 0:
                dcp.save(get_model_state_dict(saved), checkpoint_id=folder, no_dist=place is on_one)
            dist.barrier()
            state = get_model_state_dict(loaded)
            dcp.load(state, checkpoint_id=folder, no_dist=place_loaded is on_one)
            set_model_state_dict(loaded, state)
        yield loaded(randn(4, 8))

    return run


CASES = {
    "sharded by 2, loaded by 2": Case(saved_and_loaded(by_rows, by_rows)),
    "sharded by 2, loaded by 1": Case(saved_and_loaded(by_rows, on_one)),
    "of 1, loaded by 2": Case(saved_and_loaded(on_one, by_rows)),
    "uneven shards, loaded by 1": Case(saved_and_loaded(by_rows, on_one, 17)),
    "uneven shards, loaded by 2": Case(saved_and_loaded(by_rows, by_rows, 17)),
    "tensor parallel, loaded by 2": Case(saved_and_loaded(in_parallel, in_parallel)),
    "tensor parallel, loaded by 1": Case(saved_and_loaded(in_parallel, on_one)),
    "tensor parallel, loaded by 2 that shard": Case(saved_and_loaded(in_parallel, by_rows)),
}
