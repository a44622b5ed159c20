"""The rows of one table that a rank holds, with the lookup options of its module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from subclasses.keyed.sharded.exchange import Ranks
from subclasses.keyed.sharded.plan import Rows, keys_by_table
from subclasses.keyed.sharded.table_shard import TableShard
from subclasses.keyed.tables import Table


class ShardedTable(nn.Module):
    """This rank's rows of an ``nn.Embedding`` or ``nn.EmbeddingBag``: ``weight``, a `TableShard` ``[n, D]``.

    A state dict may hold the rows of this rank, as its own does, or the whole table ``[V, D]``.
    """

    weight: nn.Parameter

    def __init__(self, module: Any, rows: Rows, rank: int, weight: nn.Parameter | None) -> None:
        super().__init__()
        self.rows = rows
        self.start, self.stop = rows.range_on(rank)
        table = Table.of(module)
        self.padding = table.padding_index if rows.total else -1
        self.mode, self.is_sparse = table.mode, table.sparse
        self._options = table._asdict()
        del self._options["weight"]
        if weight is None:
            local = module.weight.detach()[self.start : self.stop].clone()
            shard = TableShard(local, start=self.start, rows=rows.total)
            weight = nn.Parameter(shard, requires_grad=module.weight.requires_grad)
        self.weight = weight
        self.register_load_state_dict_pre_hook(_take_rows)

    @property
    def width(self) -> int:
        """The number of columns of the table, ``D``."""
        return self.weight.shape[1]

    def local_table(self, local: Tensor, ranks: int) -> Table:
        """Returns the rows of this rank with their lookup options.

        Args:
            local: ``[n, D]``, the rows.
            ranks: the number of ranks with rows of the table. If there are several, each pools sums for a mean.
        """
        mode = "sum" if ranks > 1 and self.mode == "mean" else self.mode
        here = self.start <= self.padding < self.stop
        padding = self.padding - self.start if here else None
        return Table(local, **self._options | {"mode": mode, "padding": padding})

    def look_up_nothing(self, local: Tensor) -> Tensor:
        """Returns an empty tensor through which a table without rows on this rank gets an empty gradient.

        An optimizer then has a state for each table on each rank, as checkpoints expect.
        """
        return F.embedding(
            torch.empty(0, dtype=torch.int64, device=local.device), local, sparse=self.is_sparse
        )

    def describe(self) -> tuple[Any, ...]:
        """Returns the properties that must be equal on all ranks."""
        return self.rows, self.width, self.weight.dtype, self._options

    def extra_repr(self) -> str:
        """Shows the rows of this rank."""
        return f"rows {self.start} to {self.stop} of {self.rows.total}, {self.width} columns"


def _take_rows(table: Any, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
    """Replaces a whole table in a state dict by the rows of this rank; reports the rows of another rank."""
    name = f"{prefix}weight"
    loaded = state_dict.get(name)
    if isinstance(loaded, TableShard):
        got = (loaded.start, loaded.start + loaded.local.shape[0], loaded.rows)
        expected = (table.start, table.stop, table.rows.total)
        if got != expected:
            text = "{0} to {1} of {2}"
            more[-1].append(  # the errors that load_state_dict raises together
                f"{name}: expected rows {text.format(*expected)}, got {text.format(*got)}; "
                f"torch.distributed.checkpoint loads what was saved on other ranks"
            )
    elif isinstance(loaded, Tensor) and loaded.shape == (table.rows.total, table.width):
        state_dict[name] = table.weight.like(loaded[table.start : table.stop])


def shard_tables(
    modules: Mapping[str, Any], placed: Mapping[str, Rows], rank: int
) -> dict[str, ShardedTable]:
    """Returns this rank's part of each table by key; keys that share a module or weight share it here, too."""
    made: dict[int, ShardedTable] = {}
    for keys in keys_by_table(modules).values():
        weight: nn.Parameter | None = None
        for key in keys:
            module = modules[key]
            if id(module) not in made:
                made[id(module)] = ShardedTable(module, placed[key], rank, weight)
            weight = made[id(module)].weight
    return {key: made[id(module)] for key, module in modules.items()}


def local_rows(tables: Iterable[ShardedTable], divisor: int) -> dict[int, Tensor]:
    """Returns the rows of this rank by the identity of their parameter, differentiable; gradients are divided."""
    rows_by_id: dict[int, Tensor] = {}
    for table in tables:
        if id(table.weight) not in rows_by_id:
            local = table.weight.unwrap("local")  # type: ignore[operator]
            if local.requires_grad and divisor > 1:
                local.register_hook(lambda grad: grad / divisor)
            rows_by_id[id(table.weight)] = local
    return rows_by_id


def gather(shard: Any, rows: Rows, ranks: Ranks) -> Tensor:
    """Returns the whole table on every rank; every rank must call this function."""
    parts = []
    for rank in range(ranks.count):
        count = rows.count_on(rank)
        if count:
            mine = shard.rows_here().contiguous()
            part = mine if rank == ranks.rank else mine.new_empty(count, *mine.shape[1:])
            dist.broadcast(part, group=ranks.group, group_src=rank)
            parts.append(part)
    return torch.cat(parts) if parts else shard.rows_here()
