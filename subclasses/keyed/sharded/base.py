"""The base of sharded collections: checks a batch, agrees with the other ranks, and sends ids to their rows' ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from subclasses.keyed.modules import Tables, check_ids
from subclasses.keyed.sharded import routing
from subclasses.keyed.sharded.checks import check_device, check_tables, ranks_of
from subclasses.keyed.sharded.exchange import Agreement, agree, describe, fingerprint, report_bad_batch
from subclasses.keyed.sharded.plan import ShardingPlan, modules_of, plan_by_bytes, rows_by_key
from subclasses.keyed.sharded.routing import Batch, Route
from subclasses.keyed.sharded.table import ShardedTable, gather, local_rows, shard_tables
from subclasses.keyed.tables import Table
from subclasses.keyed.tensor import KeyedJaggedTensor


class Group(NamedTuple):
    """Keys that are looked up in one exchange."""

    ids: KeyedJaggedTensor
    indices: list[int]
    tables: list[ShardedTable]
    route: Route
    local: list[Table]
    """The tables of the keys that are looked up on this rank."""
    weights: Tensor | None
    """The weights of the entries that are looked up on this rank."""
    anchors: list[Tensor]
    """Tensors that the last exchange depends on, too: its backward then runs on every rank and reaches every table."""


class ShardedCollection(nn.Module):
    """Base of sharded collections: tables by key, of which this rank holds some rows."""

    kind: type
    is_pooled: bool

    def __init__(
        self,
        collection: Any,
        mesh: DeviceMesh,
        plan: ShardingPlan | None = None,
        *,
        average_gradients: bool = False,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if not isinstance(collection, self.kind):
            raise TypeError(f"{name}: expected an {self.kind.__name__}, got {type(collection).__name__}")
        ranks = ranks_of(name, mesh)
        modules = modules_of(collection)
        check_tables(name, modules, ranks)
        self.mesh = mesh
        self.plan = plan_by_bytes(modules, ranks.count) if plan is None else plan
        self.average_gradients = average_gradients
        placed = rows_by_key(self.plan, modules, ranks.count)
        self.tables = Tables(shard_tables(modules, placed, ranks.rank))
        self._fingerprint = fingerprint([(key, t.describe()) for key, t in self._shards()])

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns the state dict of the unsharded collection, on every rank.

        Each rank must call it, and needs memory for all tables; `torch.distributed.checkpoint` requires neither.
        """
        ranks = ranks_of(type(self).__name__, self.mesh)
        return {
            f"tables.{key}.weight": gather(table.weight, table.rows, ranks) for key, table in self._shards()
        }

    def _shards(self) -> list[tuple[str, ShardedTable]]:
        return [*self.tables.items()]  # type: ignore[list-item]

    def check(self, ids: Any) -> Batch:
        """Checks a batch without communication; returns the entries of the batch."""
        name = type(self).__name__
        check_ids(name, ids, self.tables)
        check_device(name, ids, ranks_of(name, self.mesh))
        tables = self.tables_of(ids.keys)
        batch = routing.batch_of(ids)
        totals = [t.rows.total for t in tables]
        bad = routing.find_bad_key(batch, totals)
        if bad is not None:
            raise ValueError(
                f"{name}: expected ids from 0 to {totals[bad] - 1} for {ids.keys[bad]!r}, got others"
            )
        return batch

    def tables_of(self, keys: Iterable[str]) -> list[ShardedTable]:
        """Returns the tables of some keys."""
        return [self.tables[key] for key in keys]  # type: ignore[misc]

    def _agree(self, ids: Any) -> tuple[Batch, Agreement]:
        """Returns the entries of this rank's batch, and facts of all batches; raises on all ranks if a batch is bad."""
        name = type(self).__name__
        ranks = ranks_of(name, self.mesh)
        try:
            batch = self.check(ids)
            parameters = [t.weight for t in self.tables_of(ids.keys)]
            weights = ids.unwrap("weights") if self.is_pooled else None
            facts = describe(self._fingerprint, ids, weights, parameters)
        except (TypeError, ValueError, KeyError):
            report_bad_batch(ranks)
            raise
        return batch, agree(name, facts, ranks)

    def route_by_kind(self, ids: Any, kind_of: Callable[[ShardedTable], Any]) -> list[Group]:
        """Sends the ids to the ranks that hold their rows: the keys of each kind of table in one exchange."""
        batch, agreement = self._agree(ids)
        tables = self.tables_of(ids.keys)
        rows = local_rows(tables, self.mesh.size() if self.average_gradients else 1)
        kinds = [kind_of(t) for t in tables]
        groups = []
        for kind in dict.fromkeys(kinds):
            indices = [k for k, other in enumerate(kinds) if other == kind]
            whole = len(indices) == len(tables)
            part = ids if whole else ids.permute(indices)
            entries = batch if whole else routing.batch_of(part)
            groups.append(self._route(part, entries, indices, agreement, rows))
        return groups

    def _route(
        self, ids: Any, batch: Batch, indices: list[int], agreement: Agreement, rows: dict[int, Tensor]
    ) -> Group:
        tables = self.tables_of(ids.keys)
        if self.is_pooled:
            batch = routing.without_padding(batch, [t.padding for t in tables])
        ranks = ranks_of(type(self).__name__, self.mesh)
        route = routing.make_route(batch, [t.rows for t in tables], agreement, ranks)
        holders = [route.holders(k) for k in route.here]
        local = [
            tables[k].local_table(rows[id(tables[k].weight)], n)
            for k, n in zip(route.here, holders, strict=True)
        ]
        absent = [t for k, t in enumerate(tables) if k not in route.here]
        anchors = [t.look_up_nothing(rows[id(t.weight)]) for t in absent]
        dtype = tables[0].weight.dtype
        anchors.append(
            torch.empty(0, dtype=dtype, device=ranks.device, requires_grad=agreement.needs_gradient)
        )
        weights = None
        if agreement.has_weights:
            weights, came = route.send_weights(ids.unwrap("weights"), agreement.needs_weight_gradient)
            anchors.append(came)
        return Group(ids, indices, tables, route, local, weights, anchors)
