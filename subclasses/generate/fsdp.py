"""The two hooks through which FSDP2 gathers a parameter from the ranks that hold a part of it.

Parameters are sharded along dim 0. An inner tensor whose first dim is that of the outer tensor is gathered; any
other, a scale of the whole tensor, say, is the same on every rank and stays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subclasses._torch import preserve_version_counter
from subclasses.dispatch.structural import follows_dtype

Gathered = tuple[Any, tuple[Tensor, ...]]


def pre_all_gather(x: Any, mesh: Any, outer_size: Any, mp_policy: Any) -> tuple[tuple[Tensor, ...], Any]:
    """The inner tensors to gather, in the dtype that the policy asks for, and what to rebuild with."""
    dtype = None if mp_policy is None else mp_policy.param_dtype
    gathered, inners = [], {}
    for field in type(x).__spec__.inners:
        t = x.__dict__[field.name]
        if t is not None and dtype is not None and follows_dtype(x, field, t):
            t = t.to(dtype)
        inners[field.name] = t
        if t is not None and is_sharded(x, t, outer_size):
            gathered.append(field.name)
    if mesh is not None and mesh.size() == 1:
        # FSDP then gathers nothing and hands back the first tensor alone; the others are whole already.
        del gathered[1:]
    return tuple(inners[n] for n in gathered), (x._layout, tuple(gathered), inners, _dynamics(x))


def is_sharded(x: Any, t: Tensor, outer_size: Any) -> bool:
    """Whether an inner tensor is a part of a larger one: its rows are those of the shard."""
    return x.dim() > 0 and t.dim() > 0 and t.size(0) == x.size(0) and len(outer_size) == x.dim()


def post_all_gather(outputs: tuple[Tensor, ...], metadata: Any, out: Any) -> Gathered | None:
    """The whole parameter from the gathered inner tensors.

    With ``out`` nothing is returned: its inner tensors are the ones given, or views of them, which FSDP filled
    anew; where they are not, the new ones are put in place.
    """
    layout, gathered, inners, dynamics = metadata
    whole = inners | dict(zip(gathered, outputs, strict=True))
    if out is None:
        new = layout.cls._wrap(layout, *whole.values(), *dynamics)
        return new, outputs
    target = out if isinstance(out, layout.cls) else out._local_tensor
    with torch.no_grad():
        for name, t in whole.items():
            held = target.__dict__[name]
            if t is not None and held.untyped_storage().data_ptr() != t.untyped_storage().data_ptr():
                with preserve_version_counter(
                    held
                ):  # the same value as at the first gather, which autograd saved
                    held.copy_(t)
    return None


def _dynamics(x: Any) -> list[int]:
    return [x.__dict__[f.name] for f in type(x).__spec__.dynamics]
