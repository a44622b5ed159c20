"""Modules that were given to `fully_shard`, before and after they are compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from subclasses.int8 import Int8WeightOnlyConfig, quantize_
from tests.distributed.models import FORMATS, MLP, Adapted, of_format, of_low_rank, of_pairs, of_scaled
from tests.distributed.world import Case, Run, World, randn

Prepare = Callable[..., nn.Module]


def whole_then_compiled(world: World, model: nn.Module, **options: Any) -> nn.Module:
    return world.compile(world.fully_shard(model, **options))


def compiled_then_whole(world: World, model: nn.Module, **options: Any) -> nn.Module:
    return world.fully_shard(world.compile(model), **options)


def layers_then_compiled(world: World, model: nn.Module, **options: Any) -> nn.Module:
    for layer in model.children():
        world.fully_shard(layer, **options)
    return world.compile(world.fully_shard(model, **options))


def layers_then_each_compiled(world: World, model: nn.Module, **options: Any) -> nn.Module:
    for name, layer in list(model.named_children()):
        setattr(model, name, world.compile(world.fully_shard(layer, **options)))
    return world.fully_shard(model, **options)


def each_compiled_then_layers(world: World, model: nn.Module, **options: Any) -> nn.Module:
    for name, layer in list(model.named_children()):
        setattr(model, name, world.fully_shard(world.compile(layer), **options))
    return world.fully_shard(model, **options)


def parallel_then_layers(world: World) -> nn.Module:
    """On a mesh of two dims: cut by one, sharded by the other."""
    model = MLP()
    if (mesh := world.mesh_2d()) is None:
        return model
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return layers_then_compiled(world, parallelize_module(model, mesh["b"], plan), mesh=mesh["a"])


def training(
    prepare: Prepare, make: Callable[[], nn.Module] = MLP, size: tuple[int, ...] = (4, 8), **options: Any
) -> Run:
    """Three steps; each rank has half of the batch, and one process all of it."""
    return steps(lambda world: prepare(world, make(), **options), size=size)


def steps(
    prepared: Callable[[World], nn.Module],
    *,
    shared_batch: bool = False,
    size: tuple[int, ...] = (4, 8),
) -> Run:
    """Three steps; each rank has its rows of the batch, or all of it."""

    def run(world: World) -> Iterator[Any]:
        model = prepared(world)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        for seed in range(3):
            x = randn(*size, seed=seed)
            y = model(x if shared_batch else world.rows(x))
            y.float().square().mean().backward()
            y = y.detach()
            yield y if shared_batch else world.all_rows(y), [p.grad for p in trained]
            optimizer.step()
            optimizer.zero_grad()

    return run


def inference(world: World) -> Iterator[Any]:
    compiled = layers_then_compiled(world, quantized())
    with torch.no_grad():
        for seed in range(3):
            yield world.all_rows(compiled(world.rows(randn(4, 8, seed=seed))))


def quantized() -> nn.Module:
    """Int8 weights that are frozen, biases that are not."""
    model = MLP()
    quantize_(model, Int8WeightOnlyConfig())
    return model


def adapted() -> nn.Module:
    model = quantized()
    model.up, model.down = Adapted(model.up), Adapted(model.down)
    return model


def frozen(make: Callable[[], nn.Module]) -> Run:
    """Calls, and the class of each rank's part of a parameter."""

    def run(world: World) -> Iterator[Any]:
        model = make().requires_grad_(False)
        compiled = whole_then_compiled(world, model)
        for seed in range(2):
            yield world.all_rows(compiled(world.rows(randn(4, 8, seed=seed))))
        yield [type(world.local(p)).__name__ for p in model.parameters()]

    return run


def clipped(make: Callable[[], nn.Module]) -> Run:
    """Steps with the norm of all gradients, over several backwards."""

    def run(world: World) -> Iterator[Any]:
        model = whole_then_compiled(world, make())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for seed in range(3):
            x = randn(4, 8, seed=seed)
            for factor in (1, 2):
                model(world.rows(x) * factor).square().mean().backward()
            yield nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            yield world.all_rows(model(world.rows(x)).detach())

    return run


BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
CASES = {
    "whole, then compiled": Case(training(whole_then_compiled)),
    "compiled, then whole": Case(training(compiled_then_whole)),
    "layer by layer, then compiled": Case(training(layers_then_compiled)),
    "layer by layer, each then compiled": Case(training(layers_then_each_compiled)),
    "each layer compiled, then layer by layer": Case(training(each_compiled_then_layers)),
    "not freed after the forward, then compiled": Case(
        training(layers_then_compiled, reshard_after_forward=False)
    ),
    "each layer compiled, then not freed after the forward": Case(
        training(each_compiled_then_layers, reshard_after_forward=False)
    ),
    "bfloat16, then compiled": Case(training(layers_then_compiled, **BF16), tolerance=3e-2),
    "each layer compiled, then bfloat16": Case(training(each_compiled_then_layers, **BF16), tolerance=3e-2),
    "tensor parallel, then layer by layer, then compiled": Case(
        steps(parallel_then_layers, shared_batch=True)
    ),
    "int8 weights: inference": Case(inference),
    "int8 weights, trained biases": Case(training(layers_then_compiled, quantized)),
    "int8 weights, trained adapters": Case(training(layers_then_compiled, adapted)),
    **{
        f"{name} weights, trained adapters": Case(
            training(layers_then_compiled, partial(of_format, name), size=(4, 64))
        )
        for name in FORMATS
    },
    "weights of a mapping class: inference": Case(frozen(of_pairs)),
    "trained weights of a mapping class": Case(training(whole_then_compiled, of_pairs)),
    "the same, layer by layer, bfloat16": Case(
        training(layers_then_compiled, of_pairs, **BF16), tolerance=3e-2
    ),
    "weights of a class that materializes: inference": Case(frozen(of_scaled)),
    "trained weights of a class that materializes": Case(training(whole_then_compiled, of_scaled)),
    "trained low-rank weights, AdamW, clipped": Case(clipped(of_low_rank)),
}
