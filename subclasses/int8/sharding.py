"""FSDP2 hooks of an int8 parameter: for any blocks, the int8 numbers and a scale for each row are gathered.

Rows that do not divide evenly among the ranks are padded. FSDP2 then accepts only inputs of the padded shard's size.
The bytes of scales and zero points are packed into tensors of this size; a scale for each row needs one such tensor.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses.int8.parts import with_row_blocks
from subclasses.methods.fsdp import Gathered, ShardState, post_all_gather, pre_all_gather


class Packed(NamedTuple):
    """Metadata for rebuilding a parameter: a shard of it, and the number of rows of the whole parameter."""

    shard: Any
    rows: int


# ---- the hooks ---------------------------------------------------------------------------------------------


def all_gather_inputs(x: Any, mesh: Any, outer_size: Any, dtype: torch.dtype | None) -> Any:
    """Returns the all-gather inputs of one rank, and metadata. ``dtype`` changes the outer dtype, not the scales."""
    x = x if dtype is None else x.to(dtype)
    shard = with_row_blocks(x)
    ranks = 1 if mesh is None else mesh.size()
    if outer_size[0] % ranks == 0:
        return pre_all_gather(shard, mesh, outer_size, None)
    rows = -(-outer_size[0] // ranks)
    return _packed(shard, rows), Packed(shard, outer_size[0])


def rebuild_parameter(outputs: tuple[Tensor, ...], metadata: Any, out: Any) -> Gathered | None:
    """Rebuilds the whole parameter; see :func:`subclasses.methods.fsdp.post_all_gather`."""
    if not isinstance(metadata, Packed):
        return post_all_gather(outputs, metadata, out)
    shard, rows = metadata
    parts = {"qdata": outputs[0][:rows], **_unpacked(outputs[1:], shard, rows)}
    inners = dict.fromkeys(type(shard).__spec__.attributes) | parts
    gathered = post_all_gather(
        tuple(parts.values()), ShardState(shard._layout, inners, tuple(parts), ()), out
    )
    # FSDP frees the returned tensors between gathers. The scales were copied to storage of their own, so they stay.
    return gathered and (gathered[0], outputs)


# ---- bytes -------------------------------------------------------------------------------------------------


def _packed(x: Any, rows: int) -> tuple[Tensor, ...]:
    """Returns the int8 numbers of a shard and the bytes of its scales, as tensors of ``rows`` padded rows."""
    size = (rows, *x.shape[1:])
    extra = torch.cat([_bytes(t) for t in _scales(x).values()], 1)
    width = math.prod(x.shape[1:])
    extra = F.pad(extra, (0, -extra.shape[1] % width, 0, rows - extra.shape[0]))
    qdata = F.pad(x.qdata.reshape(len(x.qdata), width), (0, 0, 0, rows - len(x.qdata)))
    return (qdata.view(size), *(part.contiguous().view(size) for part in extra.split(width, 1)))


def _unpacked(outputs: tuple[Tensor, ...], shard: Any, rows: int) -> dict[str, Tensor]:
    """Unpacks the scales of the whole parameter, and the zero points if it has them."""
    parts, left = {}, 0
    extra = torch.cat([t.flatten(1) for t in outputs], 1)[:rows]
    for name, t in _scales(shard).items():
        right = left + math.prod(t.shape[1:]) * t.element_size()
        parts[name] = (
            extra[:, left:right]
            .clone(memory_format=torch.contiguous_format)
            .view(t.dtype)
            .view(rows, *t.shape[1:])
        )
        left = right
    return parts


def _scales(x: Any) -> dict[str, Tensor]:
    return {"scale": x.scale} | ({} if x.zero_point is None else {"zero_point": x.zero_point})


def _bytes(t: Tensor) -> Tensor:
    """Returns the bytes of each row, ``[rows, bytes of a row]`` int8."""
    return (
        t.reshape(len(t), math.prod(t.shape[1:]))
        .clone(memory_format=torch.contiguous_format)
        .view(torch.int8)
    )
