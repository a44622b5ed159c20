"""Modules that were given to `parallelize_module`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleOutput, RowwiseParallel

from subclasses.int8 import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    PerTensor,
    quantize_,
)
from tests.distributed.cases.sharded import steps
from tests.distributed.models import MLP, Block
from tests.distributed.world import Case, Run, World, randn

PLANS: dict[type[nn.Module], Callable[[], dict[str, Any]]] = {
    MLP: lambda: {"up": ColwiseParallel(), "down": RowwiseParallel()},
    Block: lambda: {**{name: ColwiseParallel() for name in "qkv"}, "out": RowwiseParallel()},
}
SIZES = {MLP: (4, 8), Block: (2, 3, 16)}


def forward(cls: type[nn.Module], config: Any = None) -> Run:
    def run(world: World) -> Iterator[Any]:
        model = cls()
        if config is not None:
            quantize_(model, config)
        compiled = world.compile(world.parallelize(model, PLANS[cls]()))
        with torch.no_grad():
            for seed in range(2):
                yield compiled(randn(*SIZES[cls], seed=seed))

    return run


def training(cls: type[nn.Module], plan: Callable[[], dict[str, Any]] | None = None) -> Run:
    def prepared(world: World) -> nn.Module:
        return world.compile(world.parallelize(cls(), (plan or PLANS[cls])()))

    return steps(prepared, shared_batch=True, size=SIZES[cls])


def by_sequence() -> dict[str, Any]:
    """Activations between the layers are `DTensor`s; the result is sharded by rows until it is gathered."""
    return {
        "": PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate()),
        "up": ColwiseParallel(use_local_output=False, output_layouts=Shard(0)),
        "down": RowwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0), use_local_output=False),
    }


def whole_dtensors() -> dict[str, Any]:
    """The model returns a `DTensor`."""
    return {
        "up": ColwiseParallel(use_local_output=False),
        "down": RowwiseParallel(use_local_output=False),
    }


NAMES = {MLP: "two layers", Block: "attention block"}
CONFIGS = {
    "int8 weights": Int8WeightOnlyConfig(),
    "int8 weights, one scale": Int8WeightOnlyConfig(PerTensor()),
    "int8 weights and activations": Int8DynamicActivationInt8WeightConfig(),
}
CASES = {
    **{f"{name}: forward": Case(forward(cls)) for cls, name in NAMES.items()},
    **{f"{name}: training": Case(training(cls)) for cls, name in NAMES.items()},
    "two layers, activations sharded by rows: training": Case(training(MLP, by_sequence)),
    "two layers, `DTensor` result: training": Case(training(MLP, whole_dtensors)),
    **{
        # The scale of activations derives from the columns of a rank.
        f"{name}: {kind}": Case(forward(cls, config), tolerance=3e-2 if "activations" in kind else 1e-5)
        for cls, name in NAMES.items()
        for kind, config in CONFIGS.items()
    },
}
