"""Modules inside `DistributedDataParallel`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from tests.distributed.cases.sharded import adapted, training
from tests.distributed.models import MLP
from tests.distributed.world import Case, Run, World, randn

Prepare = Callable[..., nn.Module]


def compiled_inside(world: World, model: nn.Module, **options: Any) -> nn.Module:
    return world.data_parallel(world.compile(model), **options)


def compiled_outside(world: World, model: nn.Module, **options: Any) -> nn.Module:
    return world.compile(world.data_parallel(model, **options))


def accumulating(prepare: Prepare) -> Run:
    """Gradients of two batches, reduced once."""

    def run(world: World) -> Iterator[Any]:
        model = MLP()
        parallel = prepare(world, model)
        for seed in range(4):
            last = seed % 2 == 1
            with contextlib.nullcontext() if last or world.mesh is None else parallel.no_sync():
                parallel(world.rows(randn(4, 8, seed=seed))).square().mean().backward()
            if last:
                yield [p.grad for p in model.parameters()]
                model.zero_grad()

    return run


CASES = {
    f"{name}{what}": case
    for name, prepare in {
        "compiled, then DDP": compiled_inside,
        "DDP, then compiled": compiled_outside,
    }.items()
    for what, case in {
        "": Case(training(prepare)),
        ", `no_sync`": Case(accumulating(prepare)),
        ", `static_graph`": Case(training(prepare, static_graph=True)),
        ", `gradient_as_bucket_view`": Case(training(prepare, gradient_as_bucket_view=True)),
        ", int8 weights with trained adapters": Case(training(prepare, adapted)),
        ", the same with `init_sync=False`": Case(training(prepare, adapted, init_sync=False)),
    }.items()
}
