"""The rows of the table, by section."""

from __future__ import annotations

from tests.distributed.cases import (
    checkpoints,
    collectives,
    data_parallel,
    dtensors,
    sharded,
    tensor_parallel,
)
from tests.distributed.world import Case

SECTIONS: dict[str, dict[str, Case]] = {
    "`DTensor`": dtensors.CASES,
    "tensor parallelism": tensor_parallel.CASES,
    "`fully_shard`": sharded.CASES,
    "`DistributedDataParallel`": data_parallel.CASES,
    "collectives": collectives.CASES,
    "`distributed.checkpoint`": checkpoints.CASES,
}
CASES = {f"{section}: {name}": case for section, cases in SECTIONS.items() for name, case in cases.items()}
