"""Makes Int8Tensors of other inner tensors, with the metadata of an existing Int8Tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from subclasses.int8 import blocks


def with_parts(x: Any, qdata: Tensor, scale: Tensor, zero_point: Tensor | None, **metadata: Any) -> Any:
    """Returns a value with other inner tensors, and the metadata of ``x`` updated by ``metadata``."""
    statics = dict(zip((f.name for f in type(x).__spec__.statics), x._layout.statics, strict=True))
    return type(x)(qdata, scale, zero_point, **(statics | metadata))


def map_parts(x: Any, change: Any, **metadata: Any) -> Any:
    """Returns a value with ``change`` applied to each inner tensor that is present."""
    parts: list[Any] = [None if t is None else change(t) for t in (x.qdata, x.scale, x.zero_point)]
    return with_parts(x, *parts, **metadata)


def with_row_blocks(x: Any) -> Any:
    """Returns the same tensor with blocks that span one row each; it shares the int8 numbers."""
    counts = (x.qdata.size(0), *x.scale.shape[1:])
    scale, zero_point = (
        None if t is None else blocks.refine_scale(t, counts) for t in (x.scale, x.zero_point)
    )
    return with_parts(x, x.qdata, scale, zero_point, partial=False)  # type: ignore[arg-type]
