"""A shard keeps what the conformance kit asks of every class."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("torch.distributed.device_mesh")

from subclasses.keyed.sharded import TableShard
from subclasses.testing import suite


def make(start=2, local=3):
    return TableShard(torch.randn(local, 2), start=start, rows=9)


def whole(x):
    """The whole table, with zeros where this rank has no rows."""
    n = x.local.shape[0]
    return F.pad(x.unwrap("local"), (0, 0, x.start, x.rows - x.start - n))


TestConformance = suite(make, reference=whole, variants=[lambda: make(start=4)])
