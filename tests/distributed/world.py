"""The argument of a case: a way to compile, and a mesh of two ranks or none.

A case is a generator of results. It runs once without a mesh, in one process and in eager mode, and the other runs must
equal this run. Without a mesh, `shard` and similar methods return their argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests import doors

RANKS = 2


DOORS: dict[str, Callable[[Any], Any]] = {
    "eager": doors.eager,
    "stock": doors.by_stock,
    "desugar.compile": doors.by_desugar,
    'backend="desugar"': doors.by_torch,
}


@dataclass(frozen=True)
class World:
    """Two ranks, or one process; each method returns its argument where there is one process."""

    mesh: DeviceMesh | None = None
    compile: Callable[[Any], Any] = DOORS["eager"]

    @property
    def rank(self) -> int:
        return dist.get_rank() if self.mesh is not None else 0

    def mesh_2d(self) -> DeviceMesh | None:
        """A mesh of one by two."""
        return None if self.mesh is None else init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("a", "b"))

    def distribute(self, x: Tensor, *placements: Any, mesh: DeviceMesh | None = None) -> Tensor:
        """A leaf that lies as `placements` say; a partial one has a third on the first rank."""
        if self.mesh is None:
            return x
        mesh = mesh or self.mesh
        if placements == (Partial(),):
            return DTensor.from_local(x * (self.rank + 1) / 3, mesh, placements)
        return distribute_tensor(x, mesh, placements)

    def local(self, x: Tensor) -> Tensor:
        """This rank's part of a tensor."""
        return x.to_local() if isinstance(x, DTensor) else x

    def rows(self, x: Tensor) -> Tensor:
        """This rank's rows of a batch."""
        return x if self.mesh is None else x.chunk(RANKS)[self.rank]

    def all_rows(self, x: Tensor) -> Tensor:
        """The rows of all ranks."""
        if self.mesh is None:
            return x
        parts = [torch.empty_like(x) for _ in range(RANKS)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    def parallelize(self, model: nn.Module, plan: Mapping[str, Any], **options: Any) -> nn.Module:
        return model if self.mesh is None else parallelize_module(model, self.mesh, dict(plan), **options)

    def fully_shard(self, module: nn.Module, **options: Any) -> nn.Module:
        return module if self.mesh is None else fully_shard(module, **{"mesh": self.mesh} | options)

    def data_parallel(self, module: nn.Module, **options: Any) -> nn.Module:
        return module if self.mesh is None else DistributedDataParallel(module, **options)


Run = Callable[[World], Iterator[Any]]


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    run: Run
    alone: Run | None = None  # the results of one process, where `run` cannot compute them
    tolerance: float = 1e-5


def randn(*size: int, seed: int = 0) -> Tensor:
    """The same numbers on all ranks."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))
