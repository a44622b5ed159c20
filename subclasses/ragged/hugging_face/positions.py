"""Positions that transformers scales by the longest row of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_RESIZED = ("sam3_lite_text_text_model",)  # these resize learned positions to the longest row


def scaled_positions(config: Any) -> list[tuple[str, int]]:
    """Returns (type, length) of positions that transformers scales if a row of the batch is longer."""
    if config.model_type in _RESIZED:
        return [("resized", 0)]
    given = getattr(config, "rope_parameters", None) or {}
    ropes = [given] if "rope_type" in given else [x for x in given.values() if isinstance(x, Mapping)]
    return [
        (rope["rope_type"], rope.get("original_max_position_embeddings") or config.max_position_embeddings)
        for rope in ropes
        if rope.get("rope_type") in ("longrope", "dynamic")
    ]
