"""Checks of meshes, tables and batches; none of them communicates with other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from subclasses.errors import one_of
from subclasses.keyed.sharded.exchange import Ranks
from subclasses.keyed.sharded.table import ShardedTable


def ranks_of(name: str, mesh: Any) -> Ranks:
    """Returns the process group of a mesh of one dim that this process is part of."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{name}: expected a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(
            f"{name}: expected a mesh of one dim, got {mesh.ndim}; give one of its dims, such as mesh['name']"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"{name}: expected a mesh that this process is part of, got {mesh}; call it only on the ranks "
            f"of the mesh"
        )
    return Ranks(mesh.get_group(), mesh.get_local_rank(), mesh.size(), torch.device(mesh.device_type))


def check_tables(name: str, modules: Mapping[str, Any], ranks: Ranks) -> None:
    """Raises unless the tables are plain tensors on the device of the mesh, or on meta, and are not written to."""
    for key, module in modules.items():
        weight = module.weight
        if type(weight) not in (Tensor, nn.Parameter):
            raise TypeError(
                f"{name}: expected a plain tensor as the table of {key!r}, got {one_of(type(weight))}"
            )
        if weight.device.type not in (ranks.device.type, "meta"):
            raise ValueError(
                f"{name}: expected the table of {key!r} on {ranks.device.type}, the device of the mesh, got "
                f"{weight.device}; move the collection there first, by collection.to({ranks.device.type!r})"
            )
        if module.max_norm is not None:
            raise ValueError(
                f"{name}: the table of {key!r} has max_norm, with which each lookup writes to it; renormalise the rows "
                f"after the optimizer's step instead"
            )


def check_device(name: str, ids: Any, ranks: Ranks) -> None:
    """Raises ValueError unless a batch is on the device from which the process group sends tensors."""
    device = ids._raw_values.device
    if device.type != ranks.device.type:
        raise ValueError(
            f"{name}: expected ids on {ranks.device.type}, the device of the mesh, got {device}; "
            f"move them there by ids.to({ranks.device.type!r})"
        )


def check_weights(name: str, ids: Any, tables: Sequence[ShardedTable]) -> None:
    """Raises ValueError unless the weights of a batch have the dtype of all tables."""
    weights = ids._raw_weights
    if weights is None:
        return
    wrong = [t.weight.dtype for t in tables if t.weight.dtype != weights.dtype]
    if wrong:
        raise ValueError(
            f"{name}: expected weights of the tables' dtype, {wrong[0]}, got {weights.dtype}; convert the batch with "
            f"ids.to({wrong[0]})"
        )
