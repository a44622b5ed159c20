"""Lookups that write to their table, by ``max_norm``: Dynamo breaks the graph there, and they run in eager mode."""

from __future__ import annotations

from typing import Any

import torch

from subclasses.keyed.tables import WRITES_TO_TABLES, look_up_parts, pool_parts

_reason = f"a table with max_norm: {WRITES_TO_TABLES}"

pool_outside: Any = torch.compiler.disable(pool_parts, reason=_reason)
look_up_outside: Any = torch.compiler.disable(look_up_parts, reason=_reason)
