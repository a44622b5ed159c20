"""Models of declared classes saved by `torch.distributed.checkpoint`, and loaded on as many ranks or others."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from subclasses.int8 import Int8WeightOnlyConfig, quantize_
from tests.distributed.models import MLP, of_low_rank, of_pairs, of_scaled
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


def continued(make: Callable[[], nn.Module], place_loaded: Place) -> Run:
    """Training goes on from a checkpoint with the optimizer's states."""

    def run(world: World) -> Iterator[Any]:
        model = by_rows(world, make())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        yield losses(world.compile(model), optimizer)
        if world.mesh is None:
            yield losses(model, optimizer)
            return
        with shared_folder(world) as folder:
            dcp.save(dict(zip("mo", get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)
            torch.manual_seed(1)
            loaded = place_loaded(world, make())
            other = torch.optim.AdamW(loaded.parameters(), lr=0.1)
            state = dict(zip("mo", get_state_dict(loaded, other), strict=True))
            dcp.load(state, checkpoint_id=folder, no_dist=place_loaded is on_one)
            set_state_dict(loaded, other, model_state_dict=state["m"], optim_state_dict=state["o"])
        yield losses(world.compile(loaded), other)

    return run


def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Three steps on one batch, which all ranks have."""
    found = []
    for _ in range(3):
        loss = model(randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


def in_full(make: Callable[[], nn.Module], *, frozen: bool) -> Run:
    """The whole state, which one process loads, of the optimizer too."""

    def run(world: World) -> Iterator[Any]:
        model = by_rows(world, make().requires_grad_(not frozen))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if not frozen:
            losses(world.compile(model), optimizer)
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = model.state_dict() if world.mesh is None else get_model_state_dict(model, options=whole)
        yield [type(x).__name__ for x in state.values()] if world.rank == 0 else ["Scaled"] * 2
        y = world.compile(model)(randn(4, 8)).detach()
        loaded = make()
        if world.rank == 0:
            loaded.load_state_dict(state)
        yield y, loaded(randn(4, 8)).detach() if world.rank == 0 else y
        if frozen:
            return
        if world.mesh is None:
            states = optimizer.state_dict()["state"]
        else:
            states = get_optimizer_state_dict(model, optimizer, options=whole).get("state", {})
        if world.rank == 0:
            yield [type(x["exp_avg"]).__name__ for x in states.values()]
        else:
            yield ["Scaled.Cotangent"] * 2

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
    "trained weights of a mapping class, AdamW, loaded by 2": Case(continued(of_pairs, by_rows)),
    "trained weights of a mapping class, AdamW, loaded by 1": Case(continued(of_pairs, on_one)),
    "trained low-rank weights, AdamW, loaded by 2": Case(continued(of_low_rank, by_rows)),
    "trained low-rank weights, AdamW, loaded by 1": Case(continued(of_low_rank, on_one)),
    "full state dict of a class that materializes": Case(in_full(of_scaled, frozen=True)),
    "full state dict of a trained one, AdamW": Case(in_full(of_scaled, frozen=False)),
}
