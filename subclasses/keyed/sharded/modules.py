"""Collections of embedding tables that are sharded over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from subclasses.keyed.lookup import look_up, pool
from subclasses.keyed.modules import EmbeddingBagCollection, EmbeddingCollection, check_modes
from subclasses.keyed.rows import feature_rows
from subclasses.keyed.sharded.base import Group, ShardedCollection
from subclasses.keyed.sharded.checks import check_weights
from subclasses.keyed.sharded.exchange import tie
from subclasses.keyed.sharded.plan import ShardingPlan
from subclasses.keyed.sharded.routing import Batch
from subclasses.keyed.tensor import KeyedJaggedTensor
from subclasses.ragged import JaggedTensor

# ---- pooled ----------------------------------------------------------------------------------------------------


class ShardedEmbeddingBagCollection(ShardedCollection):
    """An `EmbeddingBagCollection` whose tables are sharded over the ranks of a mesh; `shard` makes one."""

    kind = EmbeddingBagCollection
    is_pooled = True

    def check(self, ids: Any) -> Batch:
        """Checks the weights too."""
        batch = super().check(ids)
        tables = self.tables_of(ids.keys)
        check_modes(type(self).__name__, ids, [t.mode for t in tables])
        check_weights(type(self).__name__, ids, tables)
        return batch

    @torch.compiler.disable
    def forward(self, ids: KeyedJaggedTensor) -> dict[str, Tensor]:
        """Looks up and pools the rows of each key; returns ``[B, D]`` by key, 0 for an empty row.

        Every rank calls it with a batch of its own, of any batch size, and gets the unsharded collection's result for
        that batch.

        Raises:
            KeyError: a key has no table.
            ValueError: an id is outside of its table, weights do not fit, or another rank's batch does not match. All
                ranks raise then, and no rows were sent.
        """
        groups = self.route_by_kind(ids, lambda table: table.weight.dtype)
        received = tie([_pool_group(group) for group in groups])
        rows_by_index: dict[int, Tensor] = {}
        for group, flat in zip(groups, received, strict=True):
            rows_by_index |= _combine(group, flat)
        return {key: rows_by_index[k] for k, key in enumerate(ids.keys)}


def _pool_group(group: Group) -> Tensor:
    """Pools the rows that are here, for all ranks; returns the parts of this rank's batch from all ranks."""
    route = group.route
    pooled = route.ids.new_zeros(route.offsets.shape[1] - 1, 0).to(group.tables[0].weight.dtype)
    if group.local:
        pooled = torch.cat(pool(group.local, route.ids, route.offsets, None, group.weights), 1)
    return route.return_rows(pooled, [t.width for t in group.tables], group.anchors)


def _combine(group: Group, received: Tensor) -> dict[int, Tensor]:
    """Returns the pooled rows of each key, by its index in the batch, from the parts of all ranks."""
    parts = group.route.split_rows(received, [t.width for t in group.tables])
    rows_by_index = {}
    for k, (index, table) in enumerate(zip(group.indices, group.tables, strict=True)):
        ranks = [rank for rank, keys in enumerate(group.route.held) if k in keys]
        if ranks:
            counts = group.route.counts[ranks, k]
            rows_by_index[index] = _join([parts[rank, k] for rank in ranks], counts, table.mode)
        else:
            rows_by_index[index] = received.new_zeros(group.ids.batch_size, table.width)
    return rows_by_index


def _join(parts: list[Tensor], counts: Tensor, mode: str) -> Tensor:
    """Joins the pooled rows ``[B, D]`` of several ranks, which pooled ``counts [ranks, B]`` entries."""
    if len(parts) == 1:
        return parts[0]
    stacked = torch.stack(parts)
    if mode == "max":
        absent = (counts == 0).unsqueeze(2)
        highest = stacked.masked_fill(absent, float("-inf")).max(0).values
        return highest.masked_fill(absent.all(0), 0.0)
    total = stacked.sum(0)
    return total if mode == "sum" else total / counts.sum(0).clamp(min=1).unsqueeze(1).to(total.dtype)


# ---- without pooling -------------------------------------------------------------------------------------------


class ShardedEmbeddingCollection(ShardedCollection):
    """An `EmbeddingCollection` whose tables are sharded over the ranks of a mesh; `shard` makes one."""

    kind = EmbeddingCollection
    is_pooled = False

    @torch.compiler.disable
    def forward(self, ids: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks up the rows of each key; returns ``[B, T, D]`` by key.

        Every rank calls it with a batch of its own, of any batch size, and gets the unsharded collection's result for
        that batch.

        Raises:
            KeyError: a key has no table.
            ValueError: an id is outside of its table, or another rank's batch does not match. All ranks raise then, and
                no rows were sent.
        """
        groups = self.route_by_kind(ids, lambda table: (table.width, table.weight.dtype))
        entries = tie([_look_up_group(group) for group in groups])
        rows_by_index: dict[int, JaggedTensor] = {}
        for group, values in zip(groups, entries, strict=True):
            rows_by_index |= {k: feature_rows(values, ids.offsets[k], ids.max_length) for k in group.indices}
        return {key: rows_by_index[k] for k, key in enumerate(ids.keys)}


def _look_up_group(group: Group) -> Tensor:
    """Looks up the rows that are here, for all ranks; returns ``[total, D]`` for this rank's values."""
    route = group.route
    entries = route.ids.new_zeros(0, group.tables[0].width).to(group.tables[0].weight.dtype)
    if group.local:
        entries = look_up(group.local, route.ids, route.offsets)
    return route.return_entries(entries, group.ids._raw_values.shape[0], group.anchors)


# ---- either -----------------------------------------------------------------------------------------------------


def shard(
    collection: EmbeddingBagCollection | EmbeddingCollection,
    mesh: DeviceMesh,
    plan: ShardingPlan | None = None,
    *,
    average_gradients: bool = False,
) -> Any:
    """Shards the tables of a collection over the ranks of a mesh; every rank calls it.

    Each rank copies its rows from its own collection. So a row has the value that its rank's collection had, and the
    ranks need not have started from the same seed. Tables on the meta device stay there: load or initialize them after
    ``to_empty``.

    A table's gradient is the sum of the gradients of the ranks' losses, as if one process computed the sum of these
    losses. ``DistributedDataParallel`` and FSDP2 average instead; beside them, give ``average_gradients=True``.

    Args:
        collection: the unsharded collection, with plain tables. It is not changed.
        mesh: of one dim.
        plan: a placement for each table, the same on all ranks; None means `plan_by_bytes`.
        average_gradients: divides the gradients of tables by the number of ranks, but not the gradients of weights.

    Returns:
        A `ShardedEmbeddingBagCollection` or `ShardedEmbeddingCollection`. Each of its parameters is a
        `TableShard`, with the name that it has in the collection.

    Raises:
        TypeError: an argument is not a collection of plain tables, or not a mesh.
        ValueError: the mesh has more than one dim or is without this process, or the plan does not fit the tables. A
            table is on another device or has ``max_norm``.
    """
    kinds = {kind.kind: kind for kind in (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)}
    sharded_kind = next((kind for base, kind in kinds.items() if isinstance(collection, base)), None)
    if sharded_kind is None:
        raise TypeError(
            f"shard: expected an EmbeddingBagCollection or EmbeddingCollection, got {type(collection).__name__}"
        )
    return sharded_kind(collection, mesh, plan, average_gradients=average_gradients)
