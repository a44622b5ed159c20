"""The placement of each table's rows on ranks, and a planner that counts only bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

# ---- the plan --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableWise:
    """A whole table on one rank.

    Args:
        rank: the rank in the mesh.
    """

    rank: int


@dataclass(frozen=True)
class RowWise:
    """A table cut by rows into contiguous parts of ``ceil(V / ranks)`` rows; the last parts may be smaller or empty."""


@dataclass(frozen=True)
class ShardingPlan:
    """The placement of the table of each key.

    Args:
        placements: a `TableWise` or `RowWise` for each key of a collection. A table that several keys use needs a
            placement for one of them.

    Raises:
        TypeError: a placement is neither, or a key is not a string.
    """

    placements: Mapping[str, TableWise | RowWise]

    def __post_init__(self) -> None:
        for key, placement in self.placements.items():
            if not isinstance(key, str) or not isinstance(placement, TableWise | RowWise):
                raise TypeError(
                    f"ShardingPlan: expected a TableWise(rank) or RowWise() for each key, got {placement!r} for {key!r}"
                )
        object.__setattr__(self, "placements", MappingProxyType(dict(self.placements)))

    def __reduce__(self) -> Any:  # a mapping proxy cannot be pickled
        return type(self), (dict(self.placements),)

    def bytes_by_rank(self, tables: Any, world_size: int) -> list[int]:
        """Returns how many bytes of the tables each rank holds.

        Args:
            tables: a collection, or its tables by key.
            world_size: the number of ranks.

        Raises:
            ValueError: the plan does not fit the tables or the number of ranks.
        """
        modules = modules_of(tables)
        placed = rows_by_key(self, modules, world_size)
        distinct = [keys[0] for keys in keys_by_table(modules).values()]
        return [
            sum(placed[key].count_on(rank) * _row_bytes(modules[key]) for key in distinct)
            for rank in range(world_size)
        ]


# ---- where the rows are ----------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """The placement of a table's rows: ``per_rank`` rows on each rank, from rank ``first`` on."""

    total: int
    first: int
    per_rank: int

    def range_on(self, rank: int) -> tuple[int, int]:
        """Returns the first row on a rank, and the row after its last row."""
        start = (rank - self.first) * self.per_rank
        return min(max(start, 0), self.total), min(max(start + self.per_rank, 0), self.total)

    def count_on(self, rank: int) -> int:
        """Returns the number of rows on a rank."""
        start, stop = self.range_on(rank)
        return stop - start


def _rows(placement: TableWise | RowWise, total: int, world_size: int) -> Rows:
    if isinstance(placement, TableWise):
        return Rows(total, placement.rank, max(total, 1))
    return Rows(total, 0, max(-(-total // world_size), 1))


def rows_by_key(plan: ShardingPlan, modules: Mapping[str, nn.Module], world_size: int) -> dict[str, Rows]:
    """Returns the placement of the rows of each key's table; raises ValueError if the plan does not fit the tables."""
    unknown = [key for key in plan.placements if key not in modules]
    if unknown:
        raise ValueError(
            f"ShardingPlan: expected keys of the collection, which are {', '.join(modules)}, got {', '.join(unknown)}"
        )
    rows_of_key: dict[str, Rows] = {}
    for keys in keys_by_table(modules).values():
        placement = _placement_of(plan, keys)
        if isinstance(placement, TableWise) and not 0 <= placement.rank < world_size:
            raise ValueError(
                f"ShardingPlan: expected a rank from 0 to {world_size - 1} for {keys[0]!r}, got {placement.rank}"
            )
        rows = _rows(placement, _weight(modules[keys[0]]).shape[0], world_size)
        rows_of_key |= dict.fromkeys(keys, rows)
    return {key: rows_of_key[key] for key in modules}


def _placement_of(plan: ShardingPlan, keys: list[str]) -> TableWise | RowWise:
    """Returns the placement of the table that some keys share."""
    named = {key: plan.placements[key] for key in keys if key in plan.placements}
    if not named:
        raise ValueError(f"ShardingPlan: expected a placement for {keys[0]!r}, got none")
    if len(set(named.values())) > 1:
        raise ValueError(f"ShardingPlan: expected one placement for a table that keys share, got {named}")
    return next(iter(named.values()))


# ---- tables ----------------------------------------------------------------------------------------------------


def modules_of(tables: Any) -> dict[str, nn.Module]:
    """Returns the embedding modules of a collection, or of a mapping, by key."""
    modules = getattr(tables, "tables", tables)
    if not isinstance(modules, Mapping | nn.ModuleDict):
        raise TypeError(
            f"expected a collection of embedding tables, or its tables by key, got {type(tables).__name__}"
        )
    return dict(modules.items())


def keys_by_table(modules: Mapping[str, nn.Module]) -> dict[int, list[str]]:
    """Returns the keys that use each distinct table, by the identity of the table's weight."""
    keys_by_id: dict[int, list[str]] = {}
    for key, module in modules.items():
        keys_by_id.setdefault(id(module.weight), []).append(key)
    return keys_by_id


def _weight(module: nn.Module) -> Tensor:
    return module.weight  # type: ignore[return-value]


def _row_bytes(module: nn.Module) -> int:
    weight = _weight(module)
    return weight.shape[1] * weight.element_size()


# ---- a simple planner ------------------------------------------------------------------------------------------


def plan_by_bytes(tables: Any, world_size: int, *, row_wise_over: int | None = None) -> ShardingPlan:
    """Plans shards of about as many bytes on each rank.

    Tables with more bytes than ``row_wise_over`` are cut by rows. The others stay whole: the largest first, each goes
    to the rank with the fewest bytes so far. The planner ignores how often a table is looked up.

    Args:
        tables: a collection, or its tables by key. Tables may be on the meta device.
        world_size: the number of ranks.
        row_wise_over: in bytes; None means a rank's fair share of all tables.

    Raises:
        ValueError: ``world_size`` is below 1.
        TypeError: ``tables`` are not tables by key.
    """
    if world_size < 1:
        raise ValueError(f"plan_by_bytes: expected at least one rank, got {world_size}")
    modules = modules_of(tables)
    groups = keys_by_table(modules).values()
    sizes = {keys[0]: _weight(modules[keys[0]]).shape[0] * _row_bytes(modules[keys[0]]) for keys in groups}
    limit = sum(sizes.values()) / world_size if row_wise_over is None else row_wise_over
    cut = [key for key, size in sizes.items() if size > limit and world_size > 1]
    chosen: dict[str, TableWise | RowWise] = {key: RowWise() for key in cut}
    loads = ShardingPlan(chosen).bytes_by_rank({key: modules[key] for key in cut}, world_size)
    for key in sorted(set(sizes) - set(cut), key=lambda key: (-sizes[key], list(sizes).index(key))):
        rank = loads.index(min(loads))
        chosen[key] = TableWise(rank)
        loads[rank] += sizes[key]
    return ShardingPlan({key: chosen[keys[0]] for keys in groups for key in keys})
