"""Values with other inner tensors, and the metadata of one that is there."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from subclasses.int8 import blocks
from subclasses.layout import cotangent_layout


def with_parts(x: Any, qdata: Tensor, scale: Tensor, zero_point: Tensor | None, **metadata: Any) -> Any:
    """A value with other inner tensors, and the metadata of ``x`` but for what is given."""
    kept = dict(zip((f.name for f in type(x).__spec__.statics), x._layout.statics, strict=True))
    new = type(x)(qdata, scale, zero_point, **(kept | metadata))
    if x._layout.cotangent:
        new.__dict__["_layout"] = cotangent_layout(new._layout)
    return new


def map_parts(x: Any, change: Any, **metadata: Any) -> Any:
    """A value in which ``change`` was applied to each inner tensor that is there."""
    parts: list[Any] = [None if t is None else change(t) for t in (x.qdata, x.scale, x.zero_point)]
    return with_parts(x, *parts, **metadata)


def rows_apart(x: Any) -> Any:
    """The same tensor with blocks that lie in one row each; its numbers are shared."""
    counts = (x.qdata.size(0), *x.scale.shape[1:])
    scale, zero_point = (None if t is None else blocks.refine(t, counts) for t in (x.scale, x.zero_point))
    return with_parts(x, x.qdata, scale, zero_point, partial=False)  # type: ignore[arg-type]
