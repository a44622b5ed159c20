"""Rotary positions that transformers scales by the longest row of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def scaled_positions(config: Any) -> list[tuple[str, int]]:
    """Returns (type, length) of rotary positions that transformers scales if a row of the batch is longer."""
    given = getattr(config, "rope_parameters", None) or {}
    ropes = [given] if "rope_type" in given else [x for x in given.values() if isinstance(x, Mapping)]
    return [
        (rope["rope_type"], rope.get("original_max_position_embeddings") or config.max_position_embeddings)
        for rope in ropes
        if rope.get("rope_type") in ("longrope", "dynamic")
    ]
