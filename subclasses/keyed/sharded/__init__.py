"""Embedding collections whose tables are sharded over the ranks of a device mesh."""

import torch

if not torch.distributed.is_available():
    raise ImportError(
        "subclasses.keyed.sharded needs torch.distributed, which this build of PyTorch does not have; look up "
        "unsharded collections with subclasses.keyed"
    )

from subclasses.keyed.sharded.modules import (
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    shard,
)
from subclasses.keyed.sharded.optimizer import RowWiseAdagrad
from subclasses.keyed.sharded.plan import RowWise, ShardingPlan, TableWise, plan_by_bytes
from subclasses.keyed.sharded.table_shard import TableShard

__all__ = [
    "RowWise",
    "RowWiseAdagrad",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "ShardingPlan",
    "TableShard",
    "TableWise",
    "plan_by_bytes",
    "shard",
]
